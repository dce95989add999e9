"""Scripted prefill and decode workers in this process: real gRPC, real registration, no model.

The token at output position p is `FIRST_TOKEN + p`, its text " w<token>", on whichever worker, so that a
test can tell a gap from a duplicate. Gates hold a phase open; journals tell what the worker saw.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.kv_cache.block_pool import KvEventLog, KvEventReader
from splitserve.client.registry_client import RegistryClient
from splitserve.errors import SplitserveError, TransferError, UnavailableError
from splitserve.rpc.carried_calls import CarriedCalls, CarriedMethod, decode_methods, prefill_methods
from splitserve.rpc.server import OpenRpcs, RpcServer
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from tests.support.cluster.registrations import registration
from tests.support.journal import Gate, Journal

FIRST_TOKEN = 100
SAID_QUEUE_MS = 1.0
"""What a fake says that a prompt has waited, while it waits not at all."""
HEARTBEAT_S = 0.05


def output(
    position: int, max_tokens: int, stop_at: int | None, padding: int = 0
) -> generation_pb2.OutputDelta:
    """The one token at this position; the last one carries the finish reason."""
    token = FIRST_TOKEN + position
    text = f" w{token}" + "." * padding
    delta = generation_pb2.OutputDelta(first_position=position, token_ids=[token], text=text)
    if position == stop_at:
        delta.finish_reason = generation_pb2.FINISH_REASON_STOP
    elif position + 1 >= max_tokens:
        delta.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    return delta


class FakeWorker:
    """Server, registration and reports of a fake; `start`, then `stop`."""

    pool: registry_pb2.Role.ValueType

    def __init__(self, worker_id: str, coordinator: str, **registered: Any) -> None:
        self.worker_id = worker_id
        self.coordinator = coordinator
        self.epoch = uuid.uuid4().int & (2**63 - 1) | 1
        self.registered = registered
        self.open_rpcs = OpenRpcs()
        self.draining = False
        self.stop_at: int | None = None
        self.load: dict[str, Any] = {}
        """Put into each load report in place of what is there."""
        self.kv_events = KvEventLog()
        """What a test has said that this worker caches."""
        self.cache_sessions: Journal[KvEventReader] = Journal()
        self.tasks: set[asyncio.Task[None]] = set()
        self.peers: list[kv_transfer_pb2.TransferEndpoint] = []
        self.peer_lists: Journal[list[str]] = Journal()
        self.deaf = False
        """Whether it does nothing about the lists of peers that it gets."""
        self.refused: Journal[SplitserveError] = Journal()
        self.server = RpcServer(open_rpcs=self.open_rpcs)

    async def start(self) -> None:
        port = await self.server.start("127.0.0.1", 0, [])
        request = registration(
            self.worker_id, self.pool, f"127.0.0.1:{port}", epoch=self.epoch, **self.registered
        )
        self.agent_id = request.endpoint.agent_id
        self.registry = RegistryClient(
            self.coordinator,
            request,
            report=self._report,
            on_peers=self._on_peers,
            heartbeat_s=HEARTBEAT_S,
            read_cache=self._read_cache,
        )
        self._membership = self.spawn(self._stay_registered())

    def carry(self, methods: dict[str, CarriedMethod]) -> None:
        """Serves carried calls of these methods. Call it once, before `start`."""
        calls = CarriedCalls(methods, self.open_rpcs)
        add_CallServiceServicer_to_server(calls, self.server.grpc_server)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def fall_silent(self) -> None:
        """Ends reports and heartbeats; calls that are open stay open."""
        self._membership.cancel()

    async def stop(self) -> None:
        """Everything at once, as after SIGKILL."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.stop()

    def let_go(self) -> None:
        """Opens all gates."""

    def drain(self) -> None:
        self.draining = True
        self.registry.report_now()

    async def _stay_registered(self) -> None:
        try:
            await self.registry.run()
        except SplitserveError as error:
            self.refused.add(error)

    def _read_cache(self) -> KvEventReader:
        session = KvEventReader(self.kv_events)
        self.cache_sessions.add(session)
        return session

    def _report(self) -> registry_pb2.ReportRequest:
        return registry_pb2.ReportRequest(
            worker_id=self.worker_id,
            epoch=self.epoch,
            load=registry_pb2.WorkerLoad(
                **({"total_blocks": 128, "free_blocks": 128, "open_rpcs": self.open_rpcs.count} | self.load)
            ),
            connected_agent_ids=[peer.agent_id for peer in self.peers],
            draining=self.draining,
        )

    def _on_peers(self, _coordinator: str, peers: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        if not self.deaf:
            self.peers = peers
        self.peer_lists.add([peer.agent_id for peer in peers])
        self.registry.report_now()


class FakeDecode(FakeWorker, DecodeServiceServicer):
    """Decodes as soon as a fake prefill worker says that the handoff is complete."""

    pool = registry_pb2.ROLE_DECODE
    lease_s = 30.0
    """How long requests outlive their output stream; 0: a worker that resumes no stream."""

    def __init__(self, worker_id: str, coordinator: str, **registered: Any) -> None:
        super().__init__(worker_id, coordinator, **registered)
        self.reserves: Journal[decode_pb2.ReserveRequest] = Journal()
        self.aborts: Journal[decode_pb2.AbortRequest] = Journal()
        self.sent: Journal[generation_pb2.OutputDelta] = Journal()
        self.abort_calls: Journal[decode_pb2.AbortRequest] = Journal()
        """Those that may not have been carried out, too."""
        self.reserve_gate, self.token_gate, self.abort_gate = Gate(), Gate(), Gate()
        self.pause_at: int | None = None
        """Closes the token gate before the token at this position."""
        self.reserve_failures: list[Exception] = []
        self.padding = 0
        """Characters added to each token's text."""
        self.failure: decode_pb2.Failure | None = None
        """Sent in place of the next token."""
        self.attachments: Journal[decode_pb2.StreamOutputsRequest] = Journal()
        self.stream_gate = Gate()
        self.repeats = False
        """Whether a resumed stream has all output once more."""
        self._outputs: list[decode_pb2.SequenceOutput] = []
        self._live: dict[int, decode_pb2.ReserveRequest] = {}
        self._streams: dict[str, asyncio.Queue[decode_pb2.StreamOutputsResponse | None]] = {}
        add_DecodeServiceServicer_to_server(self, self.server.grpc_server)
        self.carry(decode_methods(self))

    @property
    def live(self) -> int:
        """Requests reserved or decoding."""
        return len(self._live)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.reserves.add(request)
        reservation = len(self.reserves.entries)
        if self.reserve_failures:
            raise self.reserve_failures.pop(0)
        await self.reserve_gate.passed()
        self._live[reservation] = request
        ticket = kv_transfer_pb2.KvTicket(
            decode_agent_id=self.agent_id,
            epoch=self.epoch,
            reservation=reservation,
            block_indices=[1, 2],
            total_bytes=8192,
            time_to_live=request.timeout,
        )
        return decode_pb2.ReserveResponse(ticket=ticket)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        self.abort_calls.add(request)
        await self.abort_gate.passed()
        found = [n for n, live in self._live.items() if live.request_id == request.request_id]
        for reservation in found:
            del self._live[reservation]
        self.aborts.add(request)
        return decode_pb2.AbortResponse(aborted=bool(found))

    async def StreamOutputs(  # type: ignore[override]
        self, request: decode_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        self.attachments.add(request)
        await self.stream_gate.passed()
        queue = self._streams[request.coordinator_id] = asyncio.Queue()
        first, rest = decode_pb2.StreamOutputsResponse(epoch=self.epoch), self._resumed(request)
        if self.lease_s:
            first.lease.FromNanoseconds(int(self.lease_s * 1e9))
        yield first
        yield rest
        while (message := await queue.get()) is not None:
            yield message
        raise UnavailableError("scripted break")

    def let_go(self) -> None:
        self.pause_at = None  # a sequence that has not come there yet does not pause either
        self.reserve_gate.open()
        self.token_gate.open()
        self.stream_gate.open()

    def _resumed(self, request: decode_pb2.StreamOutputsRequest) -> decode_pb2.StreamOutputsResponse:
        positions = {attached.request_id: attached.next_position for attached in request.requests}
        live = {live.request_id for live in self._live.values()}
        again = [
            output
            for output in self._outputs
            if output.request_id in positions
            and (self.repeats or output.delta.first_position >= positions[output.request_id])
        ]
        ended = {output.request_id for output in again if output.delta.finish_reason}
        lost = positions.keys() - live - ended
        return decode_pb2.StreamOutputsResponse(outputs=again, lost_request_ids=lost)

    async def AcknowledgeOutputs(
        self, request: decode_pb2.AcknowledgeOutputsRequest, context: Any
    ) -> decode_pb2.AcknowledgeOutputsResponse:
        return decode_pb2.AcknowledgeOutputsResponse()

    def break_streams(self, *, forget: bool = True) -> None:
        """Breaks the output streams, and forgets the requests or not; registration stays."""
        if forget:
            self._live.clear()
            self._outputs.clear()
        for queue in self._streams.values():
            queue.put_nowait(None)

    def complete(self, reservation: int) -> None:
        """What the completion's arrival does."""
        if reservation in self._live:
            self.spawn(self._decode(reservation))

    def send(self, coordinator_id: str, output: decode_pb2.SequenceOutput) -> None:
        self._outputs.append(output)
        self._streams[coordinator_id].put_nowait(decode_pb2.StreamOutputsResponse(outputs=[output]))

    async def _decode(self, reservation: int) -> None:
        request = self._live.get(reservation)
        if request is None:
            return  # aborted before this task has begun
        position = request.prior_output_tokens
        while True:
            position += 1
            if position == self.pause_at:
                self.token_gate.close()
            await self.token_gate.passed()
            if reservation not in self._live:
                return
            if self.failure is not None:
                delta = generation_pb2.OutputDelta(finish_reason=generation_pb2.FINISH_REASON_ABORT)
                ended = decode_pb2.SequenceOutput(delta=delta, failure=self.failure)
            else:
                delta = output(position, request.stop.max_tokens, self.stop_at, self.padding)
                ended = decode_pb2.SequenceOutput(delta=delta)
            ended.request_id = request.request_id
            if position == request.prior_output_tokens + 1:
                ended.admit_ms = 2.0
            self.send(request.coordinator_id, ended)
            self.sent.add(delta)
            if delta.finish_reason:
                del self._live[reservation]
                return


class FakePrefill(FakeWorker, PrefillServiceServicer):
    """Samples the first token and completes the handoff at the fake decode worker of that agent id."""

    pool = registry_pb2.ROLE_PREFILL

    def __init__(
        self, worker_id: str, coordinator: str, find_decode: Callable[[str], FakeDecode], **registered: Any
    ) -> None:
        super().__init__(worker_id, coordinator, **registered)
        self.calls: Journal[prefill_pb2.PrefillRequest] = Journal()
        self.given_up: Journal[str] = Journal()
        """Request ids of calls that ended before the handoff."""
        self.first_token_gate, self.handoff_gate = Gate(), Gate()
        self.failures: list[Exception] = []
        self.handoff_failures: list[Exception] = []
        self.broken_lanes: set[str] = set()
        """Agent ids of the decode workers that no handoff reaches."""
        self.decode_goes_first = False
        self._find_decode = find_decode
        add_PrefillServiceServicer_to_server(self, self.server.grpc_server)
        self.carry(prefill_methods(self))

    def let_go(self) -> None:
        self.first_token_gate.open()
        self.handoff_gate.open()

    async def Prefill(  # type: ignore[override]
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.calls.add(request)
        await context.send_initial_metadata(())
        complete = False
        try:
            if self.failures:
                raise self.failures.pop(0)
            if self.decode_goes_first:
                self._find_decode(request.ticket.decode_agent_id).complete(request.ticket.reservation)
            await self.first_token_gate.passed()
            delta = output(request.prior_output_tokens, request.stop.max_tokens, self.stop_at)
            yield prefill_pb2.PrefillResponse(
                first_token=prefill_pb2.FirstToken(
                    delta=delta, cached_tokens=0, queue_ms=SAID_QUEUE_MS, compute_ms=5.0
                )
            )
            if delta.finish_reason:
                complete = True
                return
            await self.handoff_gate.passed()
            if self.handoff_failures:
                raise self.handoff_failures.pop(0)
            if request.ticket.decode_agent_id in self.broken_lanes:
                raise TransferError("scripted: a write failed")
            if not self.decode_goes_first:
                self._find_decode(request.ticket.decode_agent_id).complete(request.ticket.reservation)
            complete = True
            yield prefill_pb2.PrefillResponse(
                handoff=prefill_pb2.HandoffDone(written_bytes=8192, descriptors=1, transfer_ms=3.0)
            )
        finally:
            if not complete:
                self.given_up.add(request.request_id)
