"""Metrics of the control loops of several models: those of one, with the label `model`, and their account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from autoscaler.sharing.shared_account import SharedAccount
from splitserve.metrics import gauges


def shared_metrics(own: Mapping[str, Iterable[Metric]], account: SharedAccount) -> list[Metric]:
    """All of them at one moment; `own`: those of each model."""
    families: dict[str, Metric] = {}
    for model, found in own.items():
        for family in found:
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.add_sample(sample.name, {"model": model, **sample.labels}, sample.value)
    used = GaugeMetricFamily(
        "splitserve_autoscaler_shared_used",
        "What a model has, or has ordered, of what is limited for all models together",
        labels=["model", "resource"],
    )
    for model, uses in account.used.items():
        for name in account.limits:
            used.add_metric([model, name], uses.get(name, 0.0))
    limits = gauges(
        "splitserve_autoscaler_shared_limit",
        "What all models may have together",
        "resource",
        dict(account.limits),
    )
    return [*families.values(), limits, used]
