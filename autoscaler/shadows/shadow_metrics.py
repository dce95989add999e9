"""Prometheus metrics of the shadow policies. Labels are bounded: at most `MAX_SHADOWS` names, and pools."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from autoscaler.shadows.shadow import Shadows
from autoscaler.snapshot import POOLS


def shadow_metrics(shadows: Shadows) -> Iterator[Metric]:
    """Their last decisions; nothing without shadows."""
    if not shadows.policies:
        return
    desired, standby = (
        GaugeMetricFamily(f"splitserve_autoscaler_shadow_{name}", text, labels=["policy", "pool"])
        for name, text in (
            ("desired_replicas", "Replicas that a shadow policy wants in rotation"),
            ("desired_standby", "Warm standbys that a shadow policy wants"),
        )
    )
    lending = GaugeMetricFamily(
        "splitserve_autoscaler_shadow_lending",
        "Whether decode would compute prompts meanwhile",
        labels=["policy"],
    )
    errors = CounterMetricFamily(
        "splitserve_autoscaler_shadow_errors",
        "Decisions that the code of a shadow policy could not make, or not in time",
        labels=["policy"],
    )
    overdue = GaugeMetricFamily(
        "splitserve_autoscaler_shadow_overdue",
        "Whether a shadow policy has not returned from a decision in time",
        labels=["policy"],
    )
    for one in shadows.policies:
        errors.add_metric([one.name], one.errors)
        overdue.add_metric([one.name], one.overdue)
        if one.plan is None:
            continue
        lending.add_metric([one.name], one.plan.lend_decode_to_prefill)
        for pool in POOLS:
            desired.add_metric([one.name, pool], one.plan.pool(pool).desired)
            standby.add_metric([one.name, pool], one.plan.pool(pool).standby)
    yield from (desired, standby, lending, errors, overdue)
