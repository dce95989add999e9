"""The Prometheus metrics of tenants. The number of tenants with series is bounded."""

from __future__ import annotations

from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.tenants.tenants import Tenants
from splitserve.metrics import counter, gauge

MAX_TENANTS = 500
"""The first of the tenants file have series; so many make 6,500 of them."""


def tenant_metrics(tenants: Tenants) -> list[Metric]:
    """All tenant metrics at one moment."""
    requests = CounterMetricFamily(
        "splitserve_tenant_requests", "Valid requests by how they ended", labels=["tenant", "outcome"]
    )
    tokens = CounterMetricFamily("splitserve_tenant_tokens", "Tokens charged", labels=["tenant", "kind"])
    running = GaugeMetricFamily(
        "splitserve_tenant_running_requests", "Generations in progress", labels=["tenant"]
    )
    usages = tenants.usages
    for name, usage in islice(usages.items(), MAX_TENANTS):
        for outcome, count in usage.outcomes.items():
            requests.add_metric([name, outcome], count)
        for kind, count in usage.tokens.items():
            tokens.add_metric([name, kind], count)
        running.add_metric([name], usage.running)
    unknown = counter(
        "splitserve_unauthenticated_calls", "Calls without a known API key", tenants.unauthenticated
    )
    hidden = gauge(
        "splitserve_tenants_without_series",
        f"Tenants beyond the first {MAX_TENANTS} of the file, which are in no other series of tenants",
        max(0, len(usages) - MAX_TENANTS),
    )
    return [requests, tokens, running, unknown, hidden]
