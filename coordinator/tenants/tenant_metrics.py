"""Metrics by tenant. The file of tenants bounds their labels."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coordinator.tenants.tenants import Tenants
from splitserve.metrics import counter


def tenant_metrics(tenants: Tenants) -> list[Metric]:
    """All of them at one moment."""
    requests = CounterMetricFamily(
        "splitserve_tenant_requests", "Valid requests by how they ended", labels=["tenant", "outcome"]
    )
    tokens = CounterMetricFamily("splitserve_tenant_tokens", "Tokens charged", labels=["tenant", "kind"])
    running = GaugeMetricFamily(
        "splitserve_tenant_running_requests", "Generations in progress", labels=["tenant"]
    )
    for name, account in tenants.accounts.items():
        for outcome, count in account.outcomes.items():
            requests.add_metric([name, outcome], count)
        for kind, count in account.tokens.items():
            tokens.add_metric([name, kind], count)
        running.add_metric([name], account.running)
    unknown = counter(
        "splitserve_unauthenticated_calls", "Calls without a known API key", tenants.unauthenticated
    )
    return [requests, tokens, running, unknown]
