"""Prometheus metrics of the scores. Labels are bounded: the policy in force, and at most `MAX_SHADOWS` more."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from autoscaler.counterfactuals.scoring import ShadowScoring

_LABELS = ["policy", "role"]


def score_metrics(scoring: ShadowScoring) -> Iterator[Metric]:
    """Scores of the last window that could be replayed; nothing without shadows."""
    if not scoring.policies:
        return
    gauges = {
        name: GaugeMetricFamily(f"splitserve_autoscaler_replayed_{name}", text, labels=_LABELS)
        for name, text in (
            (
                "attainment",
                "Share of the last window's requests within both targets, had this policy decided",
            ),
            ("replica_hours", "Replica-hours of the last window, had this policy decided"),
            ("gpu_hours", "GPU-hours of the last window, had this policy decided"),
        )
    }
    for one, score in scoring.scores.items():
        for name, family in gauges.items():
            family.add_metric([*one.labels], getattr(score, name))
    failures = CounterMetricFamily(
        "splitserve_autoscaler_replay_failures",
        "Replays that raised, or were killed at their deadline",
        labels=_LABELS,
    )
    for one in scoring.policies:
        failures.add_metric([*one.labels], scoring.failures[one])
    yield from (*gauges.values(), failures)
