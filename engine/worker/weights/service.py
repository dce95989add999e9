"""The gRPC service of a worker that gives its weights to workers that start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import grpc
from prometheus_client.core import Metric

from engine.worker.build import EngineParts
from kv_transfer.transports.transport import TransferEndpoint, Transport
from kv_transfer.weights.giver import WRITE_S, WeightsGiver
from kv_transfer.weights.manifest import MAX_WINDOW_BLOCKS, PULL_S
from kv_transfer.weights.taker import PIECE_S
from splitserve.config.worker import WorkerConfig
from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.logs import log_event
from splitserve.metrics import counter, counters
from splitserve.runtime.calls.call_thread import CallThread
from splitserve.security.tls import Role
from splitserve.v1 import weights_pb2
from splitserve.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server

WEIGHTS_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].full_name
TAKERS: frozenset[Role] = frozenset({"prefill", "decode", "worker"})
"""Who may take weights."""
GRANT_S = 20.0
"""Longest time in seconds that a taker lets the giver wait."""
OPEN_S = 10.0
"""Longest time in seconds until the giver is connected to the taker's window."""
RETRY_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class WeightsHost(Protocol):
    """The worker that gives."""

    config: WorkerConfig

    @property
    def parts(self) -> EngineParts:
        """The engine's parts."""
        ...

    def require_accepting(self) -> None:
        """Raises UnavailableError while the worker drains or sleeps."""


class WeightsService(WeightsServiceServicer):
    """Serves one pull at a time, on a thread and with a transport of its own: the engine's are not touched."""

    def __init__(self, host: WeightsHost, make_transport: Callable[[str], Transport]) -> None:
        self._host, self._make_transport = host, make_transport
        self.busy = False
        """Whether a pull is under way: the weights must stay where they are."""
        self._given_bytes = 0
        self._pulls = {"completed": 0.0, "failed": 0.0}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        add_WeightsServiceServicer_to_server(self, server)

    async def PullWeights(
        self, requests: AsyncIterator[weights_pb2.PullWeightsRequest], context: Context
    ) -> AsyncIterator[weights_pb2.PullWeightsResponse]:
        """See WeightsService.PullWeights in the proto."""
        self._host.require_accepting()
        reader, rate = self._host.parts.weights, self._host.config.give_weights_gb_per_s
        if reader is None or rate is None:
            message = f"worker {self._host.config.worker_id} gives no weights"
            raise UnavailableError(message, reason="NO_WEIGHTS")
        if self.busy:
            message = f"worker {self._host.config.worker_id} gives its weights to another worker now"
            raise ResourceExhaustedError(message, reason="WEIGHTS_BUSY", retry_after_s=RETRY_S)
        self.busy, outcome, began_s, given = True, "failed", time.monotonic(), self._given_bytes
        thread, giver = CallThread("weights-giver"), None
        try:
            async with _at_most(PULL_S, "a pull of weights has not ended"):
                window = await _first_window(requests)
                kind = self._host.config.transport
                giver = WeightsGiver(reader, partial(self._make_transport, kind), window)
                async with _at_most(OPEN_S, "the taker of weights has not been reached"):
                    manifest = await thread.call(giver.open)
                yield weights_pb2.PullWeightsResponse(manifest=manifest.to_proto())
                await self._give(giver, thread, requests, rate * 1e9)
                async with _at_most(WRITE_S, "the transport of weights has not closed"):
                    await thread.call(giver.close)
            outcome = "completed"
        except SplitserveError as error:
            log_event("weights.not_given", reason=error.reason, why=error.message)
            raise
        finally:
            self._pulls[outcome] += 1
            try:
                # Also after a call that is given up while it connects or writes.
                await thread.close(WRITE_S, None if giver is None else giver.close)
            finally:
                self.busy = False
        took_s, sent = time.monotonic() - began_s, self._given_bytes - given
        log_event("weights.given", bytes=sent, took_s=round(took_s, 3))

    async def _give(
        self,
        giver: WeightsGiver,
        thread: CallThread,
        requests: AsyncIterator[weights_pb2.PullWeightsRequest],
        bytes_per_s: float,
    ) -> None:
        """Writes as blocks are granted, until the taker ends its side."""
        while (request := await _next(requests)) is not None:
            if request.HasField("window") or not 1 <= len(request.blocks) <= MAX_WINDOW_BLOCKS:
                message = f"window must come once, and then blocks be 1..{MAX_WINDOW_BLOCKS}"
                raise InvalidArgumentError(message, field="blocks")
            for block in request.blocks:
                began_s = time.monotonic()
                async with _at_most(PIECE_S, "a piece of weights has not been written"):
                    count = await thread.call(partial(giver.write, block))
                self._given_bytes += count
                await asyncio.sleep(max(0.0, began_s + count / bytes_per_s - time.monotonic()))

    def metrics(self) -> list[Metric]:
        """What was given."""
        return [
            counter("splitserve_weights_given_bytes", "Bytes of weights sent to workers", self._given_bytes),
            counters("splitserve_weights_pulls", "Pulls of weights from this worker", "outcome", self._pulls),
        ]


async def _first_window(requests: AsyncIterator[weights_pb2.PullWeightsRequest]) -> TransferEndpoint:
    first = await _next(requests)
    if first is None or not first.HasField("window"):
        raise InvalidArgumentError("the first message must name a window", field="window")
    return TransferEndpoint.from_proto(first.window)


async def _next(
    requests: AsyncIterator[weights_pb2.PullWeightsRequest],
) -> weights_pb2.PullWeightsRequest | None:
    """The taker's next message; None at its end. Raises DeadlineExceededError (WEIGHTS_STALLED)."""
    async with _at_most(GRANT_S, "the taker of weights has not granted a block"):
        return await anext(requests, None)


@asynccontextmanager
async def _at_most(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises DeadlineExceededError (WEIGHTS_STALLED) once they have passed."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"{what} after {seconds:g} s", reason="WEIGHTS_STALLED") from None
