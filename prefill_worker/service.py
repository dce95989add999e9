"""The gRPC service of a prefill worker, and what connects it to the workers that take its KV."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from typing_extensions import override

from kv_transfer.handoff.messages import KvTicket
from kv_transfer.transports.polling import PollDealer
from kv_transfer.transports.transport import TransferEndpoint
from prefill_worker.kv_producer import Failed, FirstTokenReady, HandedOff, KvProducer, PrefillEvent, engine_id
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.rpc.carried_calls import CarriedMethod, prefill_methods
from splitserve.v1 import prefill_pb2
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from worker.build import EngineParts
from worker.messages import engine_request, output_delta
from worker.process import PoolService, WorkerProcess

PEER_KEPT_S = 5.0
"""Seconds that a decode worker stays connected after no coordinator names it any more. When a coordinator dies, its
requests are aborted, and the prefill worker must still tell the decode workers that it writes nothing more."""
Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(PrefillServiceServicer, PoolService):
    """Computes prompts, one per call; cancelling the call ends it. Connects to the workers that coordinators name."""

    pool = "prefill"
    producer: KvProducer
    """Set when the engine is built. Its methods are for the engine thread, but for `status`."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._queues: dict[str, asyncio.Queue[PrefillEvent]] = {}
        """The events of each call, by engine id."""
        self._peers: dict[str, dict[str, TransferEndpoint]] = {}
        """The workers that each coordinator names, by agent id."""

    @override
    def make_connector(
        self, parts: EngineParts, epoch: int, on_idle: Callable[[], None], polls: PollDealer | None = None
    ) -> KvProducer:
        """The producer polls for itself: `polls` is None."""
        self.producer = KvProducer(
            parts, self._emit, on_idle, self._on_peers_changed, spans=self._worker.spans
        )
        return self.producer

    @override
    def add_to(self, server: grpc.aio.Server) -> str:
        add_PrefillServiceServicer_to_server(self, server)
        return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name

    @override
    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        return prefill_methods(self)

    @override
    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Connects to new workers, but not to this one. Fences, after PEER_KEPT_S, workers that no coordinator names
        any more."""
        producer, before = self.producer, self._wanted()
        own = producer.endpoint.agent_id
        self._peers[coordinator] = {peer.agent_id: peer for peer in peers if peer.agent_id != own}
        wanted = self._wanted()
        gone = before.keys() - wanted.keys()

        def apply(_core: object) -> None:
            for agent_id in gone:
                producer.retire(agent_id)
            for agent_id in wanted.keys() - producer.targets():
                producer.connect(wanted[agent_id])

        self._worker.engine.post(apply)
        for agent_id in gone:
            self._loop.call_later(PEER_KEPT_S, self._fence, agent_id)

    @override
    def busy(self) -> bool:
        return bool(self._queues) or self.producer.status.in_progress > 0

    def _wanted(self) -> dict[str, TransferEndpoint]:
        """The workers that any coordinator names, by agent id."""
        return {agent: peer for known in self._peers.values() for agent, peer in known.items()}

    def _fence(self, agent_id: str) -> None:
        if agent_id not in self._wanted():
            self._worker.engine.post(lambda _core: self.producer.disconnect(agent_id))

    def _on_peers_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._worker.report_now)

    def _emit(self, events: list[tuple[str, PrefillEvent]]) -> None:
        """Passes events from the engine's thread to their calls."""
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[tuple[str, PrefillEvent]]) -> None:
        for name, event in events:
            if queue := self._queues.get(name):
                queue.put_nowait(event)

    @override
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Computes a prompt: the first token, then the end of the handoff if there is one."""
        now = time.monotonic()
        with self._counting_refusals():
            ticket = KvTicket.from_proto(request.ticket, now) if request.HasField("ticket") else None
        name = engine_id(request.request_id, next(self._numbers))
        queue = self._queues[name] = asyncio.Queue()
        try:
            # Once the caller has this metadata it may cancel: from here on the decode worker is told how the handoff
            # ends.
            await context.send_initial_metadata(())
            self._worker.require_accepting("prefill")
            facts, tenant = self._worker.parts.facts, request.precedence.tenant_key
            prompt = engine_request(
                request,
                engine_id=name,
                facts=facts,
                now=now,
                prefill_only=True,
                grammar=await self._worker.parts.grammars.compiled(request.sampling, tenant),
                ceilings=self._worker.config.ceilings,
            )
            with self._counting_refusals():
                await self._worker.engine.call(lambda core: self.producer.start(core, prompt, ticket, now))
            while True:
                event = await queue.get()
                response, last = _response(event)
                yield response
                if last:
                    return
        finally:
            del self._queues[name]
            if not self._queues:
                self._worker.service_idle()
            ended_s = time.monotonic()
            self._worker.engine.post(lambda core: self.producer.end(core, name, ticket, ended_s))

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except SplitserveError as error:
            if error.field is not None and error.field.startswith("ticket."):
                self._worker.rejected_tickets += 1
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
