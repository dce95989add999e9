"""The prefill worker on the engine thread: reports first tokens to the calls of prompts, and pushes the KV blocks of
finished chunks to the tickets' owners."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from engine.core.engine import ChunkProgress, Engine, EngineRequest, RequestOutput, StepResult
from kv_transfer.handoff.messages import KvTicket, refused_ticket
from kv_transfer.handoff.pusher import BlockWrite, KvPusher, PushDone, PushEvent, PushFailed
from kv_transfer.lanes import LaneKind, PeerLanes
from kv_transfer.transports.polling import PollDealer
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.errors import SplitserveError
from splitserve.logs import log_context, log_event
from splitserve.rpc.status import failure_error, request_error
from splitserve.tracing.context import (
    Attributes,
    FinishedSpan,
    SpanSink,
    TraceContext,
    trace_id_of,
    unix_offset_s,
)
from worker.build import EngineParts
from worker.connector import KvConnector, WorkerStatus, WriteOutcome, Writes


@dataclass(frozen=True, slots=True)
class FirstTokenReady:
    """The prompt is computed. `last`: no handoff follows."""

    output: RequestOutput
    cached_tokens: int
    queue_s: float
    compute_s: float
    chunks: int
    last: bool


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The handoff is complete: the last write was acknowledged."""

    written_bytes: int
    descriptors: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has failed."""

    error: SplitserveError


PrefillEvent = FirstTokenReady | HandedOff | Failed

EmitEvents = Callable[[list[tuple[str, PrefillEvent]]], None]


@dataclass(slots=True)
class LivePrefill:
    """One prompt. Times are on `time.monotonic`; 0: that moment has not come."""

    request_id: str
    ticket: KvTicket | None
    arrived_s: float
    trace: TraceContext | None = None
    """The span of the prompt's attempt."""
    writes: dict[int, BlockWrite] | None = None
    """The writes of the prompt's KV by handle; None where its spans are not exported."""
    began_s: float = 0.0
    computed_s: float = 0.0
    cached_tokens: int = 0
    chunks: int = 0
    over: bool = False
    """Whether the call has got its last event; the engine still holds the prompt's blocks."""
    failure: str = ""
    """Reason and message."""

    def spans(self, trace: TraceContext, ended_s: float, offset_s: float) -> list[FinishedSpan]:
        """The whole prefill, then waiting, computing and each write. `offset_s` is to add for seconds since 1970."""
        attributes: Attributes = {
            "splitserve.request_id": public_id(self.request_id),
            "splitserve.cached_tokens": self.cached_tokens,
            "splitserve.chunks": self.chunks,
        }
        start_s, end_s = self.arrived_s + offset_s, ended_s + offset_s
        own, parent = trace.child(), trace.span_id
        whole = FinishedSpan("prefill", own, parent, start_s, end_s, attributes, "server", error=self.failure)
        spans = [whole, whole.part("queue", start_s, (self.began_s or ended_s) + offset_s)]
        if self.began_s:
            computed_s = (self.computed_s or ended_s) + offset_s
            spans.append(whole.part("compute", self.began_s + offset_s, computed_s))
        for write in (self.writes or {}).values():
            size = {"splitserve.blocks": write.blocks, "splitserve.descriptors": write.descriptors}
            written_s = (write.ended_s or ended_s) + offset_s
            spans.append(whole.part("write", write.began_s + offset_s, written_s, size))
        return spans


def engine_id(request_id: str, number: int) -> str:
    """A prompt's id in the engine. `number` differs for each call: a retry may come with the same request id while the
    writes of the first attempt are still in flight.

    The id begins with a slash. No id of a reservation does, and one engine may have both.
    """
    return f"/{request_id}/{number}"


def public_id(engine_id: str) -> str:
    """The coordinator's id of a request."""
    return engine_id.removeprefix("/").rpartition("/")[0] or engine_id


class KvProducer(KvConnector):
    """Connects the engine's steps with the pusher's writes. All methods run on the engine thread.

    A request's blocks are held in the engine until none of its writes is in flight: the source memory of a write must
    not change before the write has ended.
    """

    def __init__(
        self,
        parts: EngineParts,
        emit: EmitEvents,
        on_idle: Callable[[], None] = lambda: None,
        on_peers_changed: Callable[[], None] = lambda: None,
        *,
        spans: SpanSink | None = None,
    ) -> None:
        """`spans` takes the spans of traced prompts; None: they are not exported."""
        config, transport = parts.config, parts.transport
        self._peers = PeerLanes(transport, parts.endpoint, config.expected_lane_gb_per_s, config.lane_policy)
        super().__init__(parts.endpoint, transport, PollDealer(self._peers.poll), on_idle)
        self._pusher = KvPusher(transport, parts.kv_memory)
        self._emit, self._spans = emit, spans
        self._on_peers_changed = on_peers_changed
        self._completed = self._completed_bytes = 0
        self._rejected: dict[str, int] = {}
        self._writes: Writes = {}
        self._live: dict[str, LivePrefill] = {}
        self._endpoints: dict[str, TransferEndpoint] = {}
        self._events: list[tuple[str, PrefillEvent]] = []

    def start(self, core: Engine, request: EngineRequest, ticket: KvTicket | None, now: float) -> None:
        """Queues a prompt.

        Raises FailedPreconditionError or InvalidArgumentError, with the field, for a ticket that must not be used here;
        otherwise like `Engine.add_request`, after telling the decode worker that nothing will be written.
        """
        trace = request.trace
        exported = self._spans is not None and trace is not None and trace.sampled
        prefill = LivePrefill(request.request_id, ticket, now, trace, {} if exported else None)
        if ticket is not None:
            ticket.require_adapter(request.adapter_fingerprint)
            self._pusher.start(request.request_id, ticket, self._target(ticket), now, prefill.writes)
        try:
            core.add_request(request)
        except BaseException:
            core.abort(request.request_id)
            core.release_held(request.request_id)
            self._pusher.abort(request.request_id)
            raise
        self._live[request.request_id] = prefill

    def end(self, core: Engine, request_id: str, ticket: KvTicket | None, now: float) -> None:
        """Ends a request that nobody waits for any more: no further chunk is computed; writes in flight complete.

        If the request was never started, the decode worker of its ticket is told that nothing will be written.
        Idempotent.
        """
        if (prefill := self._live.get(request_id)) is not None:
            core.abort(request_id)
            self._end(core, prefill)
        elif ticket is not None and ticket.writer_agent_id == self.endpoint.agent_id:
            self._pusher.decline(ticket, now)

    def connect(self, endpoint: TransferEndpoint) -> None:
        """Connects to a peer's memory. A failure is only logged: the next list of peers brings it again."""
        try:
            self._transport.connect(endpoint)
            self._endpoints[endpoint.agent_id] = endpoint
            self._peers.connected(endpoint)
        except BaseException as error:
            known = request_error(error, f"peer {endpoint.agent_id}")
            log_event("peer.refused", agent_id=endpoint.agent_id, reason=known.reason, error=known.message)

    def retire(self, agent_id: str) -> None:
        """Takes no more tickets of a peer. The peer is still told how the pushes to it end."""
        self._endpoints.pop(agent_id, None)
        self._peers.lost(agent_id)

    def disconnect(self, agent_id: str) -> None:
        """Fences a peer that is gone: this process cannot write to it any more."""
        self.retire(agent_id)
        self._pusher.peer_lost(agent_id)

    def targets(self) -> frozenset[str]:
        """Agent ids that tickets may name. Coordinators name those in `WorkerStatus.usable_agents`."""
        return self._transport.connected() & self._endpoints.keys()

    @override
    def before_step(self, core: Engine, now: float) -> bool:
        """Also drops notifications: nobody writes to a worker that only sends KV."""
        polling = super().before_step(core, now)
        self.polls.take_notifications()
        return polling

    @override
    def advance(self, core: Engine, now: float) -> bool:
        """Collects finished writes; True while any push or measurement is in progress."""
        self._collect(core, now)
        self._flush(core)
        return self._pusher.active > 0 or self._peers.measuring or self._transport.needs_poll

    @override
    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """Reports first tokens, then posts the writes of the chunks that became final."""
        if result.progress and self._pusher.in_flight:
            # The write of an earlier chunk may have ended meanwhile: then the last write need not wait for it.
            self.polls.poll()
            self._collect(core, now)
        for request_id in result.started:
            if prefill := self._live.get(request_id):
                prefill.began_s = now - result.duration_s
        for progress in result.progress:
            if prefill := self._live.get(progress.request_id):
                prefill.cached_tokens = progress.cached_tokens
                prefill.chunks += 1
        for output in result.outputs:
            try:
                self._on_output(core, output, now)
            except BaseException as error:
                self._give_up(core, output.request_id, error)
        self._emit_events()  # a write may be a copy by this thread: tokens do not wait for it
        outputs = {output.request_id: output for output in result.outputs}
        for progress in result.progress:
            try:
                self._on_progress(progress, outputs.get(progress.request_id), now)
            except BaseException as error:
                self._give_up(core, progress.request_id, error)
        self._flush(core)

    def _target(self, ticket: KvTicket) -> TransferEndpoint:
        """The endpoint that a ticket names.

        Raises FailedPreconditionError: TICKET_FOREIGN, TICKET_OWN, UNKNOWN_PEER or SLOW_LANE.
        """
        ticket.require_writer(self.endpoint.agent_id)
        ticket.require_another_owner(self.endpoint.agent_id)
        endpoint = self._endpoints.get(ticket.decode_agent_id)
        if endpoint is None:
            message = f"decode agent {ticket.decode_agent_id} is not connected here"
            raise refused_ticket("UNKNOWN_PEER", "decode_agent_id", message)
        self._peers.require_not_refused(ticket.decode_agent_id)
        return endpoint

    def _on_progress(self, progress: ChunkProgress, output: RequestOutput | None, now: float) -> None:
        prefill = self._live.get(progress.request_id)
        if prefill is None or prefill.over:
            return
        if prefill.ticket is None or (output is not None and output.finish_reason is not None):
            return  # no other worker continues the answer
        first_token = output.token_ids[0] if output is not None and output.token_ids else None
        self._pusher.on_progress(
            progress.request_id,
            progress.end,
            progress.block_ids,
            is_last=first_token is not None,
            first_token=first_token,
            now=now,
            group_blocks=progress.group_blocks,
        )

    def _on_output(self, core: Engine, output: RequestOutput, now: float) -> None:
        prefill = self._live.get(output.request_id)
        if prefill is None or prefill.over:
            return
        if output.failure is not None:
            self._events.append((output.request_id, Failed(failure_error(*output.failure))))
            prefill.failure = ": ".join(output.failure)
            self._end(core, prefill)
            return
        prefill.computed_s = now
        last = prefill.ticket is None or output.finish_reason is not None
        event = FirstTokenReady(
            output,
            prefill.cached_tokens,
            queue_s=prefill.began_s - prefill.arrived_s,
            compute_s=now - prefill.began_s,
            chunks=prefill.chunks,
            last=last,
        )
        self._events.append((output.request_id, event))
        if last:
            self._end(core, prefill)

    def _collect(self, core: Engine, now: float) -> None:
        for event in self._pusher.poll(now, self.polls.take_writes()):
            prefill = self._live.pop(event.request_id, None)
            trace = prefill.trace if prefill is not None else None
            with log_context(request_id=public_id(event.request_id), trace_id=trace_id_of(trace)):
                self._on_push(core, event, prefill, now)
        for agent_id in self._pusher.take_cut_off():
            log_event("peer.cut_off", agent_id=agent_id, why="a write to it failed half way")
            if (endpoint := self._endpoints.get(agent_id)) is not None:
                self.connect(endpoint)

    def _on_push(self, core: Engine, event: PushEvent, prefill: LivePrefill | None, now: float) -> None:
        core.abort(event.request_id)
        core.release_held(event.request_id)
        if isinstance(event, PushDone):
            log_event(
                "handoff.written",
                level=logging.DEBUG,
                bytes=event.written_bytes,
                descriptors=event.descriptors,
                contiguous_runs=event.contiguous_runs,
                computed_s=now - event.transfer_s,
                written_s=now,
            )
        if prefill is None:
            return
        if isinstance(event, PushFailed):
            prefill.failure = f"{event.reason}: {event.message}"
        self._export(prefill)
        if prefill.over or prefill.ticket is None:
            return
        lane = self._peers.kind_of(prefill.ticket.decode_agent_id)
        if isinstance(event, PushDone):
            self._count(lane, "completed")
            self._completed += 1
            self._completed_bytes += event.written_bytes
            done = HandedOff(event.written_bytes, event.descriptors, event.transfer_s)
            self._events.append((event.request_id, done))
        elif isinstance(event, PushFailed):
            self._count(lane, "failed")
            rejected = self._rejected.get(event.reason, 0) + 1
            self._rejected = self._rejected | {event.reason: rejected}  # the old one is in a status
            error = failure_error(event.reason, event.message)
            self._events.append((event.request_id, Failed(error)))

    def _count(self, lane: LaneKind, outcome: WriteOutcome) -> None:
        ended = self._writes.get((lane, outcome), 0) + 1
        self._writes = {**self._writes, (lane, outcome): ended}  # the old one is in a status

    def _end(self, core: Engine, prefill: LivePrefill) -> None:
        prefill.over = True
        if prefill.ticket is not None:
            self._pusher.abort(prefill.request_id)  # the push's last event releases the blocks
            return
        del self._live[prefill.request_id]
        self._export(prefill)
        core.release_held(prefill.request_id)

    def _export(self, prefill: LivePrefill) -> None:
        """Exports the spans of a traced prompt. Call it once, when the prompt's blocks are released."""
        if self._spans is not None and prefill.trace is not None and prefill.writes is not None:
            self._spans(prefill.spans(prefill.trace, time.monotonic(), unix_offset_s()))

    def _give_up(self, core: Engine, request_id: str, error: BaseException) -> None:
        """Ends a request whose handling raised `error`."""
        prefill = self._live.get(request_id)
        known = request_error(error, request_id, prefill.trace if prefill is not None else None)
        if prefill is None or prefill.over:
            return
        prefill.failure = f"{known.reason}: {known.message}"
        self._events.append((request_id, Failed(known)))
        core.abort(request_id)
        self._end(core, prefill)

    def _flush(self, core: Engine) -> None:
        before, writes = self.status, self._pusher.in_flight
        status = WorkerStatus(
            load=core.load(),
            in_progress=writes,
            transfers_in_flight=writes,
            lanes=self._peers.lanes(),
            usable_agents=self._peers.usable(),
            handoffs_completed=self._completed,
            handoff_bytes=self._completed_bytes,
            handoffs_rejected=self._rejected,
            writes=self._writes,
        )
        self._publish(status)
        if (status.usable_agents, status.lanes) != (before.usable_agents, before.lanes):
            self._on_peers_changed()
        self._emit_events()

    def _emit_events(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
