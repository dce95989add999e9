"""A prompt on a prefill worker from its arrival to the release of its blocks, and the spans of a traced one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kv_transfer.handoff.push_state import BlockWrite, PushDone
from kv_transfer.handoff.ticket import KvTicket
from splitserve.logs import log_event
from splitserve.tracing.context import TraceContext
from splitserve.tracing.finished_span import Attributes, FinishedSpan, SpanSink, unix_offset_s


@dataclass(slots=True)
class LivePrefill:
    """One prompt. Times are on `time.monotonic`; 0: it has not come to that."""

    request_id: str
    ticket: KvTicket | None
    arrived_s: float
    trace: TraceContext | None = None
    """Its attempt's span."""
    writes: dict[int, BlockWrite] | None = None
    """Its writes of KV by handle; None where its spans are not exported."""
    began_s: float = 0.0
    computed_s: float = 0.0
    cached_tokens: int = 0
    chunks: int = 0
    over: bool = False
    """Whether the client has got its last event; only blocks are still held."""
    failure: str = ""
    """Reason and message."""

    def export(self, sink: SpanSink) -> None:
        """Exports its spans, if it has a trace. Call it once, when its blocks are released."""
        if self.trace is not None:
            sink(self.spans(self.trace, time.monotonic(), unix_offset_s()))

    def spans(self, trace: TraceContext, ended_s: float, offset_s: float) -> list[FinishedSpan]:
        """The whole, then waiting, computing and each write. `offset_s` turns its times into seconds since 1970."""
        about: Attributes = {
            "splitserve.request_id": public_id(self.request_id),
            "splitserve.cached_tokens": self.cached_tokens,
            "splitserve.chunks": self.chunks,
        }
        start_s, end_s = self.arrived_s + offset_s, ended_s + offset_s
        own, parent = trace.child(), trace.span_id
        whole = FinishedSpan("prefill", own, parent, start_s, end_s, about, "server", error=self.failure)
        found = [whole, whole.part("queue", start_s, (self.began_s or ended_s) + offset_s)]
        if self.began_s:
            computed_s = (self.computed_s or ended_s) + offset_s
            found.append(whole.part("compute", self.began_s + offset_s, computed_s))
        for write in (self.writes or {}).values():
            size = {"splitserve.blocks": write.blocks, "splitserve.descriptors": write.descriptors}
            written_s = (write.ended_s or ended_s) + offset_s
            found.append(whole.part("write", write.began_s + offset_s, written_s, size))
        return found


def engine_id(request_id: str, number: int) -> str:
    """A prompt's id in the engine. `number` is another one for each call: a retry may come back with the same request
    id while the first attempt still drains.

    It begins with a slash, as no id of a reservation does: one engine may have both.
    """
    return f"/{request_id}/{number}"


def public_id(engine_id: str) -> str:
    """The coordinator's id of a request."""
    return engine_id.removeprefix("/").rpartition("/")[0] or engine_id


def log_written(done: PushDone, now: float) -> None:
    """Logs a handoff whose last write has ended at `now`, in monotonic seconds."""
    log_event(
        "handoff.written",
        level=logging.DEBUG,
        bytes=done.written_bytes,
        descriptors=done.descriptors,
        contiguous_runs=done.contiguous_runs,
        computed_s=now - done.transfer_s,
        written_s=now,
    )
