"""A request on a decode worker from its reservation to its end, and the messages to its coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.types import FinishReason, RequestOutput
from engine.worker.messages import output_delta
from splitserve.v1 import decode_pb2


@dataclass(slots=True)
class LocalPrefill:
    """A prompt that is computed on this decode worker. Times are on `time.monotonic`."""

    arrived_s: float
    cached_tokens: int
    began_s: float = 0.0
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
    public_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.public_id = public_id(self.engine_id)

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
            message.local_prefill.queue_ms = max(0.0, local.began_s - local.arrived_s) * 1e3
            message.local_prefill.compute_ms = (now - local.began_s) * 1e3
        if output.failure is not None:
            message.failure.reason, message.failure.message = output.failure
        return message

    def failed(self, reason: str, text: str) -> decode_pb2.SequenceOutput:
        """The message that it has failed."""
        ended = RequestOutput(self.engine_id, 0, finish_reason=FinishReason.ABORT)
        message = decode_pb2.SequenceOutput(request_id=self.public_id, delta=output_delta(ended))
        message.failure.reason, message.failure.message = reason, text
        return message


def public_id(engine_id: str) -> str:
    """The coordinator's id of a request."""
    return engine_id.partition("/")[2]
