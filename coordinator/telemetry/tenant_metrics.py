"""The Prometheus metrics of tenants, and the cost of their requests. A bounded number of tenants has series."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

from prometheus_client.core import Metric

from coordinator.request.state import RequestState
from coordinator.telemetry.request_record import NO_COST, CostOfRequest, RequestRecord, cost_of
from coordinator.tenants.tenants import Tenants
from splitserve.metrics import counter, counters, gauge, gauges

MAX_TENANTS = 500
"""Only this many tenants, the first of the tenants file, have series: 6,500 series in all."""


COST_METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "prefill_seconds": ("prefill_s", "Time in which prompts were computed"),
        "decode_seconds": ("decode_s", "Time from the first decode step to the end"),
        "kv_block_seconds": ("kv_block_s", "KV blocks held, times seconds"),
        "kv_written_bytes": ("written_bytes", "KV bytes that handoffs wrote"),
    }
)
"""By name of the metric: the field of `CostOfRequest`, and what it is."""


class TenantCosts:
    """The cost of all ended requests since the start, by tenant of the file."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._totals: dict[str, CostOfRequest] = {}

    def add(self, record: RequestRecord, _: RequestState) -> None:
        """Adds an ended request."""
        if record.tenant in self._tenants:
            self._totals[record.tenant] = self._totals.get(record.tenant, NO_COST) + cost_of(record)

    def metrics(self) -> list[Metric]:
        """The totals of the tenants that have series; see `MAX_TENANTS`. For the scraping thread."""
        totals = {name: self._totals.get(name, NO_COST) for name in islice(self._tenants.usages, MAX_TENANTS)}
        return [
            counters(
                f"splitserve_tenant_{name}",
                text,
                "tenant",
                {tenant: getattr(cost, field) for tenant, cost in totals.items()},
            )
            for name, (field, text) in COST_METRICS.items()
        ]


def tenant_metrics(tenants: Tenants) -> list[Metric]:
    """All tenant metrics at one moment."""
    usages = tenants.usages
    shown = dict(islice(usages.items(), MAX_TENANTS))
    requests = {
        (name, outcome): count for name, usage in shown.items() for outcome, count in usage.outcomes.items()
    }
    tokens = {(name, kind): count for name, usage in shown.items() for kind, count in usage.tokens.items()}
    running = {name: usage.running for name, usage in shown.items()}
    text = "Valid requests by how they ended"
    unknown = "Calls without a known API key"
    hidden = f"Tenants beyond the first {MAX_TENANTS} of the file, which are in no other series of tenants"
    without_series = max(0, len(usages) - MAX_TENANTS)
    return [
        counters("splitserve_tenant_requests", text, ("tenant", "outcome"), requests),
        counters("splitserve_tenant_tokens", "Tokens charged", ("tenant", "kind"), tokens),
        gauges("splitserve_tenant_running_requests", "Generations in progress", "tenant", running),
        counter("splitserve_unauthenticated_calls", unknown, tenants.unauthenticated),
        gauge("splitserve_tenants_without_series", hidden, without_series),
    ]
