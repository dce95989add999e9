"""W3C Trace Context: which trace a request belongs to. It needs no library, so that logs have trace ids without one.

As the recommendation asks, a malformed or too long header is ignored like a missing one, without error or log entry.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from splitserve.v1 import generation_pb2

MAX_TRACEPARENT = 128
"""Maximum length of a `traceparent` of later versions, in characters; version 00 has 55."""
MAX_TRACESTATE = 512
"""Maximum length of a `tracestate` that is passed on, in characters: the least that the recommendation allows."""
MAX_MEMBERS = 32
_VERSION_00 = 55
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.DOTALL)
_MEMBER = re.compile(
    r"[ \t]*(?:[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e][ \t]*"
)
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in its trace."""

    trace_id: str
    """32 hexadecimal digits in lower case, not all zero."""
    span_id: str
    """16 hexadecimal digits in lower case, not all zero."""
    sampled: bool
    """Whether its spans are recorded."""
    tracestate: str = ""
    """The value of the header `tracestate`; at most MAX_TRACESTATE characters."""

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> Self | None:
        """The context in these headers; None without a valid `traceparent`. A wrong `tracestate` is left out."""
        if traceparent is None or not _VERSION_00 <= len(traceparent) <= MAX_TRACEPARENT:
            return None
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, trace_id, span_id, flags = match.groups()
        if version == "ff" or (version == "00" and len(traceparent) != _VERSION_00):
            return None
        if not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _checked_state(tracestate or ""))

    @classmethod
    def new(cls, *, sampled: bool) -> Self:
        """The first span of a new trace."""
        return cls(secrets.token_hex(16), new_span_id(), sampled)

    @classmethod
    def from_proto(cls, message: generation_pb2.TraceContext) -> Self | None:
        """The context in a message; None without a valid one."""
        return cls.parse(message.traceparent, message.tracestate)

    def to_proto(self) -> generation_pb2.TraceContext:
        """The inverse of `from_proto`."""
        return generation_pb2.TraceContext(traceparent=self.traceparent, tracestate=self.tracestate)

    @property
    def traceparent(self) -> str:
        """The header's value, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self) -> Self:
        """A new span of the same trace."""
        return replace(self, span_id=new_span_id())


def trace_id_of(context: TraceContext | None) -> str:
    """The context's trace id; empty without a context."""
    return "" if context is None else context.trace_id


def new_span_id() -> str:
    """A random span id."""
    return secrets.token_hex(8)


def _checked_state(text: str) -> str:
    """A `tracestate` as it is, or empty if it is too long or malformed."""
    if len(text) > MAX_TRACESTATE:
        return ""
    members = [member for member in text.split(",") if member.strip(" \t")]
    valid = len(members) <= MAX_MEMBERS and all(_MEMBER.fullmatch(member) for member in members)
    return text if valid else ""


Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """One span. Times are seconds since 1970."""

    name: str
    context: TraceContext
    """The ids of this span and of its trace."""
    parent_id: str
    """Span id of the parent; empty for the first span of a trace."""
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    kind: Literal["server", "client", "internal"] = "internal"
    links: tuple[TraceContext, ...] = ()
    error: str = ""
    """Reason and message of the failure; empty if the span succeeded."""

    def part(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None
    ) -> FinishedSpan:
        """A child of this span."""
        own = self.context.child()
        return FinishedSpan(name, own, self.context.span_id, start_s, end_s, attributes or {})


SpanSink = Callable[[Sequence[FinishedSpan]], None]
"""Takes spans of a sampled trace, each before its children; never waits and never raises."""


def unix_offset_s() -> float:
    """The difference between seconds since 1970 and `time.monotonic()`, now."""
    return time.time() - time.monotonic()
