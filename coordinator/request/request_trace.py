"""The trace of one request: its own span, and where that hangs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from splitserve.tracing.context import TraceContext

Operation = Literal["chat", "text_completion"]
"""As `gen_ai.operation.name` of OpenTelemetry's conventions has it."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Made at receipt by `coordinator.entrypoints.trace_sampler`."""

    context: TraceContext
    """The request's own span; where this coordinator does not trace, the client's, unsampled."""
    parent_id: str = ""
    """The client's span id; empty: the trace begins here."""
    operation: Operation = "text_completion"
    resumed: TraceContext | None = None
    """The request's span at the coordinator that had sent the beginning of the answer."""

    @property
    def exported(self) -> bool:
        """Whether its spans are exported."""
        return self.context.sampled

    def attempt(self) -> TraceContext:
        """The context of a new attempt, with a span of its own if it is exported."""
        return self.context.child() if self.exported else self.context

    def sibling(self) -> RequestTrace:
        """The trace of one more choice of the same call."""
        return replace(self, context=self.attempt())
