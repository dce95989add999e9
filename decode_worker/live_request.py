"""A request on a decode worker from its reservation to its end: the messages to its coordinator, and its spans."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from decode_worker.reservation_queue import WaitingReservation
from engine.core.types import FinishReason, RequestOutput
from engine.worker.messages import output_delta
from splitserve.tracing.context import TraceContext
from splitserve.tracing.finished_span import Attributes, FinishedSpan, SpanSink, unix_offset_s
from splitserve.v1 import decode_pb2


@dataclass(slots=True)
class LocalPrefill:
    """A prompt that is computed on this decode worker."""

    cached_tokens: int = 0
    """Leading tokens that were in the prefix cache when it began."""
    reported: bool = False


@dataclass(slots=True)
class LiveRequest:
    """One request. `engine_id` is unique in this worker, `public_id` is the coordinator's request id."""

    engine_id: str
    coordinator_id: str
    received_blocks: tuple[int, ...] = ()
    """The blocks that the writer writes."""
    admitted_s: float | None = None
    admit_ms: float | None = None
    local: LocalPrefill | None = None
    trace: TraceContext | None = None
    """Its attempt's span."""
    arrived_s: float = 0.0
    granted_s: float = 0.0
    began_s: float = 0.0
    """When its first step began; 0: it has not. On `time.monotonic`, like the two before."""
    public_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.public_id = public_id(self.engine_id)

    @classmethod
    def of(
        cls,
        entry: WaitingReservation,
        now: float,
        received_blocks: tuple[int, ...] = (),
        local: LocalPrefill | None = None,
    ) -> LiveRequest:
        """A reservation that is granted now."""
        request = entry.request
        return cls(
            request.request_id,
            entry.coordinator_id,
            received_blocks,
            local=local,
            trace=request.trace,
            arrived_s=entry.arrived_s,
            granted_s=now,
        )

    @property
    def only_reserved(self) -> bool:
        """Whether its KV has not arrived, and is not computed here either."""
        return self.admitted_s is None and self.local is None

    def admitted(self) -> decode_pb2.SequenceOutput:
        """The message that its KV has arrived and it decodes."""
        return decode_pb2.SequenceOutput(request_id=self.public_id, admitted=True)

    def progressed(self, output: RequestOutput, now: float) -> decode_pb2.SequenceOutput:
        """The message with a step's tokens, and the times that were not sent yet. Call it once per output."""
        message = decode_pb2.SequenceOutput(request_id=self.public_id, delta=output_delta(output))
        if self.admit_ms is not None:
            message.admit_ms, self.admit_ms = self.admit_ms, None
        if (local := self.local) is not None and not local.reported:
            local.reported = True
            message.local_prefill.cached_tokens = local.cached_tokens
            message.local_prefill.queue_ms = max(0.0, self.began_s - self.arrived_s) * 1e3
            message.local_prefill.compute_ms = (now - self.began_s) * 1e3
        if output.failure is not None:
            message.failure.reason, message.failure.message = output.failure
        return message

    def failed(self, reason: str, text: str) -> decode_pb2.SequenceOutput:
        """The message that it has failed."""
        ended = RequestOutput(self.engine_id, 0, finish_reason=FinishReason.ABORT)
        message = decode_pb2.SequenceOutput(request_id=self.public_id, delta=output_delta(ended))
        message.failure.reason, message.failure.message = reason, text
        return message

    def spans(self, trace: TraceContext, ended_s: float, offset_s: float, failure: str) -> list[FinishedSpan]:
        """The whole, then its parts in order. `offset_s` turns its times into seconds since 1970."""
        about: Attributes = {
            "splitserve.request_id": self.public_id,
            "splitserve.blocks": len(self.received_blocks),
            "splitserve.local_prefill": self.local is not None,
        }
        start_s, end_s = self.arrived_s + offset_s, ended_s + offset_s
        own, parent = trace.child(), trace.span_id
        whole = FinishedSpan("decode", own, parent, start_s, end_s, about, "server", error=failure)
        moments = [("reserve", self.granted_s)]
        if self.local is None:
            moments += [("receive", self.admitted_s or 0.0), ("admit", self.began_s), ("generate", ended_s)]
        else:
            moments += [("queue", self.began_s), ("generate", ended_s)]
        found, at_s = [whole], self.arrived_s
        for name, until_s in moments:
            found.append(whole.part(name, at_s + offset_s, (until_s or ended_s) + offset_s))
            at_s = until_s
            if not until_s:
                break  # it ended during this part
        return found


class LiveRequests(dict[str, LiveRequest]):
    """The requests of a decode worker by engine id."""

    def __init__(self, sink: SpanSink | None) -> None:
        """`sink` takes the spans of traced requests; None: they are not exported."""
        super().__init__()
        self._sink = sink

    def end(self, engine_id: str, failure: str = "") -> LiveRequest | None:
        """Removes a request that has ended, and exports its spans if it is traced; None if it is unknown. `failure` is
        reason and message."""
        request = self.pop(engine_id, None)
        if request is None or self._sink is None or request.trace is None or not request.trace.sampled:
            return request
        self._sink(request.spans(request.trace, time.monotonic(), unix_offset_s(), failure))
        return request


def public_id(engine_id: str) -> str:
    """The coordinator's id of a request."""
    return engine_id.partition("/")[2]
