"""A span that has ended, as plain data: what is exported. Made from what a process knows of a request at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from splitserve.tracing.context import TraceContext

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """One span. Times are seconds since 1970."""

    name: str
    context: TraceContext
    """The span's own."""
    parent_id: str
    """Span id; empty: it begins the trace."""
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    kind: Literal["server", "client", "internal"] = "internal"
    links: tuple[TraceContext, ...] = ()
    error: str = ""
    """Reason and message; empty unless it failed."""

    def part(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None
    ) -> FinishedSpan:
        """A child of this span."""
        own = self.context.child()
        return FinishedSpan(name, own, self.context.span_id, start_s, end_s, attributes or {})


SpanSink = Callable[[Sequence[FinishedSpan]], None]
"""Takes spans of a sampled trace, a whole before its parts; never waits and never raises."""


def unix_offset_s() -> float:
    """What to add to a time of `time.monotonic` for seconds since 1970, now."""
    return time.time() - time.monotonic()
