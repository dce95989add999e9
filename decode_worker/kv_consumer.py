"""The decode worker on the engine thread: reserves blocks, admits pushed KV, emits every step's tokens."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence, Set

from typing_extensions import override

from decode_worker.output_streams import Row
from decode_worker.requests import (
    Granted,
    LiveRequest,
    LiveRequests,
    Reply,
    ReservationQueue,
    WaitingReservation,
    public_id,
)
from engine.core.engine import Engine, RequestOutput, ReservedBlocks, StepResult
from kv_transfer.handoff.checksums import HandoffVerifier, verify_one_in
from kv_transfer.handoff.messages import KvTicket, WriteCompletion
from kv_transfer.handoff.reservation_table import (
    Abort,
    Action,
    Admit,
    ReleaseWriter,
    ReservationTable,
    Silence,
    WriterDone,
)
from kv_transfer.transports.polling import PollDealer
from splitserve.errors import SplitserveError
from splitserve.logs import log_context, log_event
from splitserve.rpc.status import request_error
from splitserve.tracing.context import SpanSink, trace_id_of
from worker.build import EngineParts
from worker.connector import KvConnector, WorkerStatus

Outputs = dict[str, list[Row]]
"""Rows by coordinator id."""
Emit = Callable[[Outputs], None]


class KvConsumer(KvConnector):
    """Connects the reservation table with the engine. All methods run on the engine thread.

    Requests are identified by an id that is unique in this worker; see `LiveRequest.engine_id`.
    """

    def __init__(
        self,
        parts: EngineParts,
        epoch: int,
        emit: Emit,
        on_idle: Callable[[], None] = lambda: None,
        spans: SpanSink | None = None,
        polls: PollDealer | None = None,
    ) -> None:
        """`polls`: see `KvConnector`; None: the consumer polls the transport for itself."""
        transport, config = parts.transport, parts.config
        super().__init__(parts.endpoint, transport, polls or PollDealer(transport.poll), on_idle)
        self._block_bytes = parts.endpoint.memory.layout.block_bytes
        self._ticket_s = config.ticket_s
        one_in = verify_one_in(config.verify_kv, parts.endpoint.memory.memory_kind)
        self._verifier = HandoffVerifier(epoch, one_in, parts.kv_memory)
        self._table = ReservationTable(
            epoch, quarantine_s=config.quarantine_s, content_matches=self._content_matches
        )
        engine = config.engine
        self._waiting = ReservationQueue(
            max_waiting=engine.max_waiting_requests, max_bypasses=engine.max_bypasses
        )
        self._emit = emit
        self._requests = LiveRequests(spans)
        self._outputs: Outputs = defaultdict(list)
        self._replies: list[tuple[Reply, Granted | SplitserveError]] = []
        self._admitted = 0
        self._rejected: dict[str, int] = {}

    def reserve(self, core: Engine, entry: WaitingReservation, now: float) -> None:
        """Queues a reservation, and grants it at once if blocks are free.

        Raises like `ReservationQueue.add`. The error of a request that can never fit is passed to `entry.reply`.
        """
        self._waiting.add(entry)
        self._grant(core, now)
        self._flush(core)

    def abort(self, core: Engine, engine_id: str, coordinator_id: str, no_writer: bool, now: float) -> bool:
        """Ends a request in any state, on its coordinator's request; returns whether it was live.

        `no_writer`: the coordinator knows that nobody writes its KV, so the blocks need no quarantine.
        """
        if self._waiting.remove(engine_id):
            self._give_up_waiting(core, engine_id)
            return True
        alive = engine_id in self._requests
        if alive and self._requests[engine_id].is_local:
            self._requests.end(engine_id)
            return core.abort(engine_id)
        self._apply(core, self._table.abort(engine_id, coordinator_id, no_writer, now), silent=True)
        return alive

    def keep_requests(
        self, core: Engine, coordinator_id: str, request_ids: Set[str], now: float
    ) -> frozenset[str]:
        """Ends a coordinator's requests, except those that it still wants (`request_ids`); returns which of these are
        live.

        Request ids are the coordinator's own.
        """
        engine_ids = {
            request.public_id: engine_id
            for engine_id, request in self._requests.items()
            if request.coordinator_id == coordinator_id
        }
        engine_ids |= {public_id(engine_id): engine_id for engine_id in self._waiting.ids_of(coordinator_id)}
        for unwanted in engine_ids.keys() - request_ids:
            self.abort(core, engine_ids[unwanted], coordinator_id, False, now)
        return frozenset(engine_ids.keys() & request_ids)

    def writers_lost(self, agent_ids: Sequence[str], now: float) -> None:
        """Shortens the quarantine of these writers' blocks: their processes have certainly ended."""
        for agent_id in agent_ids:
            self._table.writer_lost(agent_id, now)

    @override
    def advance(self, core: Engine, now: float) -> bool:
        """Admits KV that has arrived, expires what is overdue, grants waiting reservations.

        True while write completions are awaited or reservations wait.
        """
        for agent_id, message in self.polls.take_notifications():
            self._on_notification(core, agent_id, message, now)
        self._apply(core, self._table.expire(now), silent=False)
        self._grant(core, now)
        self._flush(core)
        return self._table.awaited_writers > 0 or len(self._waiting) > 0 or self._transport.needs_poll

    @override
    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """Hands a step's outputs to their coordinators."""
        for engine_id, cached_tokens in result.started.items():
            request, began_s = self._requests.get(engine_id), now - result.duration_s
            if request is None:
                continue
            request.began_s = began_s
            if request.is_local:
                request.cached_tokens = cached_tokens
            elif request.admitted_s is not None:
                request.admit_ms = max(0.0, began_s - request.admitted_s) * 1e3
                self._table.started(engine_id)
        for output in result.outputs:
            try:
                self._on_output(core, output, now)
            except BaseException as error:
                self._give_up(core, output.request_id, error, now)
        self._flush(core)

    def _give_up_waiting(self, core: Engine, engine_id: str) -> None:
        """Tells the engine, which may have begun to make room for the reservation, that it waits no more."""
        if engine_id not in self._requests:
            core.abort(engine_id)

    def _grant(self, core: Engine, now: float) -> None:
        for engine_id in self._waiting.expire(now):
            self._give_up_waiting(core, engine_id)
        if not len(self._waiting):
            return
        load = core.load()
        state = (load.free_blocks, load.reserved_blocks, load.running_requests)
        self._waiting.grant(state, now, lambda entry: self._try_reserve(core, entry, now))

    def _try_reserve(self, core: Engine, entry: WaitingReservation, now: float) -> bool:
        """Grants a reservation, or replies with the error of one that can never fit; False to keep it waiting."""
        request_id, number = entry.request.request_id, self._table.next_number
        is_duplicate = request_id in self._requests
        try:
            if self._try_compute(core, entry, now):
                return True
            blocks = core.reserve(entry.request, number)
            if blocks is None:
                return False
            ticket = self._open(entry, blocks, now)
        except BaseException as error:
            self._replies.append((entry.reply, request_error(error, request_id, entry.request.trace)))
            if not is_duplicate:  # nobody has its ticket
                self._apply(core, self._table.abort(request_id, entry.coordinator_id, True, now), silent=True)
                self._requests.pop(request_id, None)
                self._verifier.forget(number)
                core.abort(request_id)
                core.release_writer(number)
            return True
        self._replies.append((entry.reply, Granted(ticket, max(0.0, now - entry.arrived_s))))
        return True

    def _open(self, entry: WaitingReservation, blocks: ReservedBlocks, now: float) -> KvTicket:
        """Records blocks that the engine has reserved, and writes their ticket."""
        request = entry.request
        count = len(blocks.block_ids)
        ticket_end = now + self._ticket_s
        number = self._table.open(
            request.request_id,
            entry.coordinator_id,
            count,
            self._block_bytes,
            request.deadline_s,
            now,
            ticket_deadline_s=ticket_end,
        )
        if entry.writer_agent_id:
            self._table.bind_writer(number, entry.writer_agent_id)
        self._requests[request.request_id] = LiveRequest.of(entry, now, count)
        ticket = KvTicket(
            decode_agent_id=self.endpoint.agent_id,
            epoch=self._table.epoch,
            reservation=number,
            block_indices=blocks.block_ids,
            cached_tokens=blocks.cached_tokens,
            total_bytes=count * self._block_bytes,
            deadline_s=min(ticket_end, request.deadline_s),
            writer_agent_id=entry.writer_agent_id,
            verify_one_in=self._verifier.one_in,
            adapter_fingerprint=request.adapter_fingerprint,
            group_blocks=blocks.group_blocks,
        )
        self._verifier.expect(number, blocks.block_ids)
        return ticket

    def _try_compute(self, core: Engine, entry: WaitingReservation, now: float) -> bool:
        """Computes the prompt here, without a handoff, if few enough of its tokens are not in the prefix cache."""
        request, most_tokens = entry.request, entry.local_prefill_tokens
        if not most_tokens or len(request.token_ids) - core.cached_tokens(request) > most_tokens:
            return False
        core.add_request(request)
        self._requests[request.request_id] = LiveRequest.of(entry, now, is_local=True)
        self._replies.append((entry.reply, Granted(None, max(0.0, now - entry.arrived_s))))
        return True

    def _on_notification(self, core: Engine, agent_id: str, message: bytes, now: float) -> None:
        verdict = self._table.on_notification(agent_id, message, now)
        if isinstance(verdict, Admit):
            try:
                self._admit(core, verdict, now)
            except BaseException as error:
                self._give_up(core, verdict.request_id, error, now)
            return
        if isinstance(verdict, WriterDone):
            core.release_writer(verdict.number)
        else:
            log_event("handoff.rejected", agent_id=agent_id, reason=verdict.reason)
        self._apply(core, verdict.actions, silent=False)

    def _admit(self, core: Engine, verdict: Admit, now: float) -> None:
        request = self._requests[verdict.request_id]
        # The writer still owns the blocks, so they cannot have been given to another request.
        core.release_writer(verdict.number)
        request.admitted_s = now
        output = core.admit(verdict.number, verdict.first_token)
        self._admitted += 1
        with log_context(request_id=request.public_id, trace_id=trace_id_of(request.trace)):
            log_event("handoff.admitted", level=logging.DEBUG, admitted_s=time.monotonic())
        self._outputs[request.coordinator_id].append((request.public_id, request.admitted()))
        if output is not None:
            self._on_output(core, output, now)

    def _apply(self, core: Engine, actions: Sequence[Action], *, silent: bool) -> None:
        """Carries out the reservation table's actions; `silent`: aborted requests get no output."""
        for action in actions:
            match action:
                case Abort():
                    self._verifier.forget(action.number)
                    core.abort(action.request_id)
                    if not action.writer_alive:
                        core.release_writer(action.number)
                    if silent:
                        self._requests.end(action.request_id)
                    else:
                        self._fail(action.request_id, action.reason, action.message)
                case ReleaseWriter():
                    core.release_writer(action.number)
                case Silence():
                    # Later completions for this reservation are rejected anyway. Refusing the peer would also
                    # drop the completions of its other requests.
                    log_event("handoff.writer_silent", agent_id=action.agent_id, reservation=action.number)

    def _on_output(self, core: Engine, output: RequestOutput, now: float) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        only_reserved = request.admitted_s is None and not request.is_local
        if output.failure is not None and only_reserved:
            # The engine failed a request that was only reserved: its writer may still be writing.
            aborted = self._table.abort(output.request_id, request.coordinator_id, False, now)
            del self._requests[output.request_id]  # the last output, below, ends the request
            self._apply(core, aborted, silent=True)
            self._requests[output.request_id] = request
        elif output.finish_reason is not None:
            self._table.finished(output.request_id)
        self._outputs[request.coordinator_id].append((request.public_id, request.progressed(output, now)))
        if output.finish_reason is not None:
            self._requests.end(output.request_id, ": ".join(output.failure or ()))

    def _content_matches(self, completion: WriteCompletion) -> bool:
        try:
            return self._verifier.matches(completion)
        except BaseException as error:
            request_error(error, f"reservation {completion.reservation}")
            return False

    def _give_up(self, core: Engine, engine_id: str, error: BaseException, now: float) -> None:
        """Ends a live request whose handling raised `error`, whatever its state; unknown ids are ignored."""
        request = self._requests.pop(engine_id, None)
        known = request_error(error, engine_id, request.trace if request is not None else None)
        if request is None:
            return
        aborted = self._table.abort(engine_id, request.coordinator_id, False, now)
        self._apply(core, aborted, silent=True)
        core.abort(engine_id)
        self._requests[engine_id] = request
        self._fail(engine_id, known.reason, known.message)

    def _fail(self, engine_id: str, reason: str, text: str) -> None:
        request = self._requests.end(engine_id, f"{reason}: {text}")
        if request is not None:
            self._outputs[request.coordinator_id].append((request.public_id, request.failed(reason, text)))

    def _flush(self, core: Engine) -> None:
        """Publishes the status, then sends replies and outputs: when a reply arrives, its request is in the status."""
        if sum(self._rejected.values()) != self._table.counters.total():
            self._rejected = dict(self._table.counters)  # a new dict: the old one is in a published status
        self._publish(
            WorkerStatus(
                load=core.load(),
                in_progress=len(self._requests),
                transfers_in_flight=self._table.awaited_writers,
                waiting_reservations=len(self._waiting),
                handoffs_completed=self._admitted,
                handoffs_rejected=self._rejected,
                completions_rejected=sum(self._rejected.values()),
            )
        )
        if self._replies:
            replies, self._replies = self._replies, []
            for reply, result in replies:
                reply(result)
        if self._outputs:
            outputs, self._outputs = self._outputs, defaultdict(list)
            self._emit(outputs)
