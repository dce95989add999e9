"""Records the traffic of one coordinator; goes on when the connection breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from splitserve.client.call_errors import described
from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, Metadata
from splitserve.security.api_keys import key_metadata
from splitserve.v1 import traffic_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub

SILENT_S = 15.0
"""A coordinator that sends nothing for this long is lost; it sends something every second."""
PAUSE_S = 0.5
"""Before the stream is opened again."""

OnRequest = Callable[[traffic_pb2.RecordedRequest, float], None]
"""Takes a request, and when it arrived: seconds since the recording began."""


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """What to record. `salt`: 16..64 random bytes, the same for all coordinators, to be forgotten afterwards."""

    salt: bytes
    seconds: float
    drain_s: float = 0.0
    model: str = ""


@dataclass(slots=True)
class RecordingTally:
    """How a recording of one coordinator went."""

    recorded: int = 0
    lost: int = 0
    """Requests that ended while this reader was too slow or away, as far as the coordinator can tell."""
    breaks: int = 0
    """How often the stream was opened again."""
    restarts: int = 0
    """How often it was another process that answered: what the one before had in progress is not known."""
    running: int = 0
    """Requests of the recording that have not ended yet."""
    since_s: float | None = None
    """When it began, by the coordinator's clock."""
    coordinator_id: str = ""
    _ended: int = field(default=0, repr=False)
    _lost_here: int = field(default=0, repr=False)

    def take(self, message: traffic_pb2.RecordTrafficResponse, *, first: bool) -> None:
        """Counts a message; `first`: the first one of a stream."""
        if first:
            if self.coordinator_id == message.coordinator_id:
                self.lost += max(0, message.ended_requests - self._ended)
            elif self.coordinator_id:
                self.restarts += 1
            self.coordinator_id = message.coordinator_id
            self.since_s = message.since.seconds + message.since.nanos / 1e9
            self._lost_here = 0
        self.lost += message.lost_requests - self._lost_here
        self._lost_here = message.lost_requests
        self._ended = message.ended_requests
        self.recorded += len(message.requests)
        self.running = message.running_requests


class TrafficClient:
    """Reads the traffic of the coordinator at "host:port"."""

    def __init__(
        self, target: str, *, security: ClusterCredentials = UNSECURED, api_key: str | None = None
    ) -> None:
        self.target = target
        self.tally = RecordingTally()
        self._security = security
        self._metadata: Metadata = (*security.metadata, *key_metadata(api_key))

    async def record(self, plan: RecordingPlan, on_request: OnRequest) -> None:
        """Passes the requests to `on_request` as they end, until the recording is over.

        A stream that breaks is opened again as long as requests of the recording may arrive. Raises SplitserveError
        if the first one cannot be opened, or the coordinator refuses.
        """
        until_s = time.monotonic() + plan.seconds
        while True:
            try:
                return await self._stream(plan, on_request)
            except (UnavailableError, DeadlineExceededError):
                if self.tally.since_s is None or time.monotonic() + PAUSE_S >= until_s:
                    if self.tally.since_s is None:
                        raise
                    return None
            await asyncio.sleep(PAUSE_S)
            self.tally.breaks += 1

    async def _stream(self, plan: RecordingPlan, on_request: OnRequest) -> None:
        request = traffic_pb2.RecordTrafficRequest(salt=plan.salt, model=plan.model)
        request.duration.FromNanoseconds(round(plan.seconds * 1e9))
        request.drain.FromNanoseconds(round(plan.drain_s * 1e9))
        if self.tally.since_s is not None:
            request.since.FromNanoseconds(round(self.tally.since_s * 1e9))
        limit_s = plan.seconds + plan.drain_s + SILENT_S
        channel = self._security.channel(self.target, "coordinator")
        try:
            call = InferenceServiceStub(channel).RecordTraffic(
                request, timeout=limit_s, metadata=self._metadata
            )
            first = True
            while (message := await self._next(call)) is not None:
                self.tally.take(message, first=first)
                first = False
                since_s = self.tally.since_s or 0.0
                for recorded in message.requests:
                    received_s = recorded.received.seconds + recorded.received.nanos / 1e9
                    on_request(recorded, max(0.0, received_s - since_s))
        except grpc.aio.AioRpcError as error:
            raise described(error, self.target, limit_s) from None
        finally:
            await channel.close()

    async def _next(
        self,
        call: grpc.aio.UnaryStreamCall[traffic_pb2.RecordTrafficRequest, traffic_pb2.RecordTrafficResponse],
    ) -> traffic_pb2.RecordTrafficResponse | None:
        try:
            async with asyncio.timeout(SILENT_S):
                message = await call.read()
        except TimeoutError:
            raise UnavailableError(f"{self.target} is silent", reason="UNREACHABLE") from None
        return message if isinstance(message, traffic_pb2.RecordTrafficResponse) else None
