"""Which requests are traced. Decided once, at receipt, for all processes: prefill and decode workers follow."""

from __future__ import annotations

from dataclasses import replace

from coordinator.request.ids import random_bits
from coordinator.request.request_trace import Operation, RequestTrace
from coordinator.tenants.usage import Limit, full, spend, wait_s
from splitserve.config.tracing import RequestTracingConfig
from splitserve.tracing.context import TraceContext

DRAW_BITS = 53


class TraceSampler:
    """Follows what clients have decided, and draws `sample_ratio` of the other requests.

    Clients that want to be traced get it `max_client_traces_per_s` times a second at most, all together: no client can
    make every request be exported.
    """

    def __init__(self, config: RequestTracingConfig) -> None:
        self.enabled = config.endpoint is not None
        self._ratio, per_s = config.sample_ratio, config.max_client_traces_per_s
        self._limit = Limit(per_s, max(1.0, per_s)) if per_s else None
        self._asked = full(self._limit, 0.0) if self._limit else None

    def begin(
        self,
        client: TraceContext | None,
        operation: Operation,
        now: float,
        resumed: TraceContext | None = None,
    ) -> RequestTrace | None:
        """The trace of a request that came at `now`, on the monotonic clock; None if there is none.

        `client` is what the client sent. Without it, an answer that is resumed goes on in the trace of `resumed`.
        """
        parent = client or resumed
        if not self.enabled:
            return RequestTrace(replace(parent, sampled=False), operation=operation) if parent else None
        if parent is None:
            return RequestTrace(TraceContext.new(sampled=self._drawn()), operation=operation)
        sampled = parent.sampled and (self._takes(now) or self._drawn())
        own = replace(parent.child(), sampled=sampled)
        return RequestTrace(own, parent.span_id, operation, resumed)

    def _drawn(self) -> bool:
        return random_bits(DRAW_BITS) < self._ratio * (1 << DRAW_BITS)

    def _takes(self, now: float) -> bool:
        if self._limit is None or self._asked is None or wait_s(self._asked, self._limit, 1.0, now) > 0:
            return False
        self._asked = spend(self._asked, self._limit, 1.0, now)
        return True
