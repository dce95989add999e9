"""The quality watch's Prometheus metrics. Workers are named only where their answers are wrong, MAX_NAMED at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.quality.model_watch import ProbeOutcome, QualityFigures
from coordinator.workers.snapshot import Isolation, PoolName

OUTCOMES: tuple[ProbeOutcome, ...] = ("right", "wrong", "unanswered", "skipped")
MAX_NAMED = 16
"""Wrong targets of a model with a series of their own."""


def quality_metrics(
    models: Iterable[QualityFigures], workers: Iterable[tuple[str, PoolName, Isolation]]
) -> list[Metric]:
    """The metrics at one moment; `workers` are each registered worker's model, pool and isolation."""
    rounds = CounterMetricFamily("splitserve_quality_rounds", "Rounds of golden prompts", labels=["model"])
    probes = CounterMetricFamily(
        "splitserve_quality_probes", "Golden prompts by outcome", labels=["model", "outcome"]
    )
    agreement = GaugeMetricFamily(
        "splitserve_quality_agreement_ratio", "Least next-token agreement in the last round", labels=["model"]
    )
    divergence = GaugeMetricFamily(
        "splitserve_quality_kl_nats",
        "Largest divergence from the reference in the last round",
        labels=["model"],
    )
    tolerance = GaugeMetricFamily(
        "splitserve_quality_tolerance_nats", "Tolerated divergence", labels=["model", "of"]
    )
    at_fault = GaugeMetricFamily(
        "splitserve_quality_at_fault", "Workers and pairs with wrong answers", labels=["model", "kind"]
    )
    wrong = GaugeMetricFamily(
        "splitserve_quality_wrong_kl_nats",
        "Divergence of the last wrong answer",
        labels=["model", "prefill_worker", "decode_worker"],
    )
    isolated = GaugeMetricFamily(
        "splitserve_quality_isolated", "Workers and pairs out of rotation", labels=["model", "kind"]
    )
    out = _isolated(workers)
    for of in models:
        rounds.add_metric([of.model], of.rounds)
        for outcome in OUTCOMES:
            probes.add_metric([of.model, outcome], of.probes.get(outcome, 0))
        agreement.add_metric([of.model], of.agreement)
        divergence.add_metric([of.model], of.kl_nats)
        tolerance.add_metric([of.model, "pair"], of.pair_tolerance_nats)
        tolerance.add_metric([of.model, "decode"], of.decode_tolerance_nats)
        found = of.suspected
        for kind, faulty in (("prefill", found.prefills), ("decode", found.decodes), ("pair", found.pairs)):
            at_fault.add_metric([of.model, kind], len(faulty))
            isolated.add_metric([of.model, kind], out[of.model, kind])
        for target, verdict in list(of.wrong.items())[:MAX_NAMED]:
            labels = [of.model, target.prefill_name, target.decode[0]]
            wrong.add_metric(labels, verdict.comparison.kl_nats)
    return [rounds, probes, agreement, divergence, tolerance, at_fault, wrong, isolated]


def _isolated(workers: Iterable[tuple[str, PoolName, Isolation]]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for model, pool, isolation in workers:
        counts[model, pool] += isolation.worker
        counts[model, "pair"] += len(isolation.agents)
    return counts
