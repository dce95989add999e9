"""The gRPC service of a worker that gives its weights to workers that start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import grpc
from prometheus_client.core import Metric

from engine.worker.build import EngineParts
from kv_transfer.transports.transport import TransferEndpoint, Transport
from kv_transfer.weights.giver import WRITE_S, WeightsGiver
from kv_transfer.weights.manifest import MAX_WINDOW_BLOCKS
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
from splitserve.runtime.call_thread import CallThread
from splitserve.security.tls import Role
from splitserve.v1 import weights_pb2
from splitserve.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server

WEIGHTS_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].full_name
TAKERS: frozenset[Role] = frozenset({"prefill", "decode", "worker"})
"""Who may take weights."""
GRANT_S = 20.0
"""Longest time in seconds that a taker lets the giver wait."""
LEASE_S = 60.0
"""Longest time of a pull in seconds, beside four times what its bytes take at the rate of the setting."""
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
        thread = CallThread("weights-giver")
        try:
            first = await _next(requests)
            if first is None or not first.HasField("window"):
                raise InvalidArgumentError("the first message must name a window", field="window")
            window = TransferEndpoint.from_proto(first.window)
            kind = self._host.config.transport
            giver = await thread.call(
                lambda: WeightsGiver(reader, lambda: self._make_transport(kind), window)
            )
            try:
                async with asyncio.timeout(LEASE_S + 4 * giver.manifest.num_bytes / (rate * 1e9)):
                    yield weights_pb2.PullWeightsResponse(manifest=giver.manifest.to_proto())
                    await self._give(giver, thread, requests, rate * 1e9)
            except TimeoutError:
                raise DeadlineExceededError(
                    "a pull of weights took too long", reason="WEIGHTS_STALLED"
                ) from None
            finally:
                await thread.call(giver.close)
            outcome = "completed"
        except SplitserveError as error:
            log_event("weights.not_given", reason=error.reason, why=error.message)
            raise
        finally:
            self._pulls[outcome] += 1
            await thread.close(WRITE_S)
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
            if request.HasField("window") or len(request.blocks) > MAX_WINDOW_BLOCKS:
                message = f"window must come once, and blocks be at most {MAX_WINDOW_BLOCKS}"
                raise InvalidArgumentError(message, field="blocks")
            for block in request.blocks:
                began_s = time.monotonic()
                count = await thread.call(partial(giver.write, block))
                self._given_bytes += count
                await asyncio.sleep(max(0.0, began_s + count / bytes_per_s - time.monotonic()))

    def metrics(self) -> list[Metric]:
        """What was given."""
        return [
            counter("splitserve_weights_given_bytes", "Bytes of weights sent to workers", self._given_bytes),
            counters("splitserve_weights_pulls", "Pulls of weights from this worker", "outcome", self._pulls),
        ]


async def _next(
    requests: AsyncIterator[weights_pb2.PullWeightsRequest],
) -> weights_pb2.PullWeightsRequest | None:
    """The taker's next message; None at its end. Raises DeadlineExceededError (WEIGHTS_STALLED)."""
    try:
        async with asyncio.timeout(GRANT_S):
            return await anext(requests, None)
    except TimeoutError:
        message = f"the taker of weights has not granted a block for {GRANT_S:g} s"
        raise DeadlineExceededError(message, reason="WEIGHTS_STALLED") from None
