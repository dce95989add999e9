"""The gRPC service of a prefill worker."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from engine.worker.messages import check_wanted, engine_request, output_delta
from engine.worker.role import WorkerHost
from kv_transfer.handoff.ticket import KvTicket
from prefill_worker.kv_producer import KvProducer
from prefill_worker.live_prefill import engine_id
from prefill_worker.prefill_event import Failed, FirstTokenReady, HandedOff, PrefillEvent
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.v1 import prefill_pb2
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(PrefillServiceServicer):
    """Computes prompts, one per call; cancelling the call ends it."""

    def __init__(
        self, worker: WorkerHost[KvProducer], loop: asyncio.AbstractEventLoop, *, prefixes_only: bool = False
    ) -> None:
        """`prefixes_only`: it gives prefixes, and refuses prompts (PREFIXES_ONLY)."""
        self._worker, self._loop, self._prefixes_only = worker, loop, prefixes_only
        self._numbers = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[PrefillEvent]] = {}
        """The events of each call, by engine id."""

    @property
    def busy(self) -> bool:
        """Whether any call is open."""
        return bool(self._queues)

    def deliver(self, events: list[tuple[str, PrefillEvent]]) -> None:
        """Passes events to their calls; for the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[tuple[str, PrefillEvent]]) -> None:
        for name, event in events:
            if queue := self._queues.get(name):
                queue.put_nowait(event)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See PrefillService.Prefill in the proto."""
        now, loop = time.monotonic(), asyncio.get_running_loop()
        with self._counting_refusals():
            ticket = KvTicket.from_proto(request.ticket, now) if request.HasField("ticket") else None
        name = engine_id(request.request_id, next(self._numbers))
        queue = self._queues[name] = asyncio.Queue()
        try:
            # Once the caller has these it may cancel: from here on the ticket's owner is told how the handoff ends.
            await context.send_initial_metadata(())
            self._worker.require_accepting()
            check_wanted(request, self._prefixes_only)
            facts = self._worker.parts.facts
            prompt = engine_request(
                request,
                engine_id=name,
                facts=facts,
                now=now,
                prefill_only=True,
                grammar=await self._worker.parts.grammars.compiled(request.sampling),
                ceilings=self._worker.config.ceilings,
            )
            with self._counting_refusals():
                await self._worker.engine.call(
                    lambda core, producer: producer.start(core, prompt, ticket, now)
                )
            while True:
                event = await queue.get()
                response, last = _response(event)
                yield response
                if last:
                    return
                if isinstance(event, FirstTokenReady):
                    # gRPC asks for the next response when it has written this one, a stream of calls writes in the
                    # turn that follows.
                    loop.call_soon(event.sent.set)
        finally:
            del self._queues[name]
            if not self._queues:
                self._worker.service_idle()
            ended_s = time.monotonic()
            self._worker.engine.post(lambda core, producer: producer.end(core, name, ticket, ended_s))

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except SplitserveError as error:
            if error.field is not None and error.field.startswith("ticket."):
                self._worker.ticket_rejected()
                log_event("ticket.rejected", reason=error.reason, error=error.message)
            raise


def _response(event: PrefillEvent) -> tuple[prefill_pb2.PrefillResponse, bool]:
    """The message for an event, and whether it is the last one. Raises the error of a Failed."""
    match event:
        case FirstTokenReady():
            token = prefill_pb2.FirstToken(
                delta=output_delta(event.output),
                cached_tokens=event.cached_tokens,
                queue_ms=event.queue_s * 1e3,
                compute_ms=event.compute_s * 1e3,
                chunks=event.chunks,
            )
            return prefill_pb2.PrefillResponse(first_token=token), event.last
        case HandedOff():
            done = prefill_pb2.HandoffDone(
                written_bytes=event.written_bytes,
                descriptors=event.descriptors,
                transfer_ms=event.transfer_s * 1e3,
            )
            return prefill_pb2.PrefillResponse(handoff=done), True
        case Failed():
            raise event.error
