"""InferenceService.RecordTraffic: one recording as a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from coordinator.records.traffic import Recording, RecordingTerms, TrafficRecorder
from splitserve.errors import InvalidArgumentError
from splitserve.logs import log_event
from splitserve.v1 import traffic_pb2

if TYPE_CHECKING:
    import grpc

    RecordContext = grpc.aio.ServicerContext[
        traffic_pb2.RecordTrafficRequest, traffic_pb2.RecordTrafficResponse
    ]

LEAST_SALT_BYTES, MOST_SALT_BYTES = 16, 64
MAX_DURATION_S, MAX_DRAIN_S = 86_400.0, 3600.0
MAX_MODEL_CHARACTERS = 128
MAX_A_MESSAGE = 256
EVERY_S = 1.0
"""Between messages, at most. A reader can tell a silent coordinator from a lost one."""


class TrafficStream:
    """Serves recordings of one coordinator."""

    def __init__(self, coordinator_id: str) -> None:
        self.recorder = TrafficRecorder()
        self._coordinator_id = coordinator_id

    async def serve(self, request: traffic_pb2.RecordTrafficRequest, context: RecordContext) -> None:
        """Writes the requests of a recording as they end, until it is over. gRPC's flow control makes it wait for a
        slow reader; the recording then counts what does not fit its buffer.

        Raises InvalidArgumentError, ResourceExhaustedError.
        """
        terms = checked_terms(request, time.time())
        recording = self.recorder.begin(terms)
        log_event("traffic.recording", seconds=round(terms.until_s - terms.since_s, 3), model=terms.model)
        try:
            await context.write(self._message(recording, 0))
            while not self._is_over(recording):
                await recording.wait(EVERY_S)
                await context.write(self._message(recording, MAX_A_MESSAGE))
        finally:
            self.recorder.end(recording)

    def _is_over(self, recording: Recording) -> bool:
        terms, now_s = recording.terms, time.time()
        if not recording.is_empty or now_s < terms.until_s:
            return False
        return now_s >= terms.until_s + terms.drain_s or not self.recorder.running(terms)

    def _message(self, recording: Recording, limit: int) -> traffic_pb2.RecordTrafficResponse:
        message = traffic_pb2.RecordTrafficResponse(
            coordinator_id=self._coordinator_id,
            requests=recording.take(limit),
            lost_requests=recording.lost,
            running_requests=self.recorder.running(recording.terms),
            ended_requests=self.recorder.ended_requests,
        )
        message.since.FromNanoseconds(round(recording.terms.since_s * 1e9))
        return message


def checked_terms(request: traffic_pb2.RecordTrafficRequest, now_s: float) -> RecordingTerms:
    """The terms of a request; `now_s` by the wall clock. Raises InvalidArgumentError naming field and bound."""
    if not LEAST_SALT_BYTES <= len(request.salt) <= MOST_SALT_BYTES:
        message = f"salt must have {LEAST_SALT_BYTES}..{MOST_SALT_BYTES} bytes, not {len(request.salt)}"
        raise InvalidArgumentError(message, field="salt")
    if len(request.model) > MAX_MODEL_CHARACTERS:
        message = f"model must have at most {MAX_MODEL_CHARACTERS} characters"
        raise InvalidArgumentError(message, field="model")
    duration_s = request.duration.seconds + request.duration.nanos / 1e9
    if not 0 < duration_s <= MAX_DURATION_S:
        message = f"duration must be above 0 and at most {MAX_DURATION_S:g} s, not {duration_s:g}"
        raise InvalidArgumentError(message, field="duration")
    drain_s = request.drain.seconds + request.drain.nanos / 1e9
    if not 0 <= drain_s <= MAX_DRAIN_S:
        raise InvalidArgumentError(f"drain must be 0..{MAX_DRAIN_S:g} s, not {drain_s:g}", field="drain")
    since_s = now_s
    if request.HasField("since"):
        since_s = request.since.seconds + request.since.nanos / 1e9
        if not now_s - duration_s - drain_s <= since_s <= now_s:
            message = "since must not be in the future, nor so long ago that the recording is over"
            raise InvalidArgumentError(message, field="since")
    return RecordingTerms(request.salt, since_s, since_s + duration_s, drain_s, request.model)
