"""What the Prometheus endpoint shows of admission. Read on the scraping thread."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.admission.gate import AdmissionCounts
from coordinator.coordinator_metrics import add_durations


def admission_metrics(counts: Mapping[str, AdmissionCounts]) -> list[Metric]:
    """All series; `counts` by model. Classes and reasons are fixed sets."""
    waited = HistogramMetricFamily(
        "splitserve_admission_queue_seconds",
        "Time in the coordinator's queue of requests that went on",
        labels=["model", "class"],
    )
    queued = GaugeMetricFamily(
        "splitserve_admission_queued_requests", "Requests in the queue", labels=["model", "class"]
    )
    tokens = GaugeMetricFamily(
        "splitserve_admission_queued_prompt_tokens", "Their prompt tokens", labels=["model"]
    )
    refused = CounterMetricFamily(
        "splitserve_admission_refused", "Requests that were not let in", labels=["model", "reason"]
    )
    for model, count in counts.items():
        for name, durations in count.waited.items():
            add_durations(waited, [model, name], durations)
            queued.add_metric([model, name], count.queued[name])
        tokens.add_metric([model], count.queued_prompt_tokens)
        for reason, number in count.refused.items():
            refused.add_metric([model, reason.lower()], number)
    return [waited, queued, tokens, refused]
