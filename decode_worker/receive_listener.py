"""The decode worker on the engine thread: reserves, admits what arrived, hands out every step's tokens."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.waiting_room import Granted, WaitingReservation, WaitingRoom
from engine.build import EngineParts
from engine.core import EngineCore
from engine.host import RoleListener
from engine.messages import output_delta
from engine.types import FinishReason, RequestOutput, StepResult
from kv_transfer.reservation_actions import Abort, Action, Admit, Fence, ReleaseWriter, WriterDone
from kv_transfer.reservations import ReservationTable
from kv_transfer.ticket import KvTicket
from kv_transfer.verify import ONE_IN, HandoffVerifier
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.v1 import decode_pb2

Outputs = dict[str, list[decode_pb2.SequenceOutput]]
Emit = Callable[[Outputs], None]


@dataclass(slots=True)
class _Request:
    """A request between its reservation and its end."""

    coordinator_id: str
    public_id: str
    received_blocks: tuple[int, ...] = ()
    """Those that the writer fills."""
    admitted_s: float | None = None
    admit_ms: float | None = None
    local: _LocalPrefill | None = None


@dataclass(slots=True)
class _LocalPrefill:
    """A prompt that is computed here. Times in seconds."""

    arrived_s: float
    cached_tokens: int
    began_s: float = 0.0
    reported: bool = False


class ReceiveListener(RoleListener):
    """Joins the book of reservations with the engine. All methods run on the engine thread.

    Requests are known here by an id that is unique in this worker; `_Request.public_id` is what the
    coordinator calls them.
    """

    def __init__(self, parts: EngineParts, epoch: int, emit: Emit) -> None:
        config = parts.config
        self.endpoint = parts.endpoint
        self._transport = parts.transport
        self._block_bytes = parts.endpoint.pool.layout.block_bytes
        self._ticket_s = config.ticket_s
        self._wire = parts.runner.wire
        self._verifier = HandoffVerifier(epoch, ONE_IN[config.verify_kv], self._wire.read_blocks)
        self._table = ReservationTable(
            epoch,
            lease_s=config.lease_s,
            quarantine_s=config.quarantine_s,
            content_matches=self._verifier.matches,
        )
        engine = config.engine
        self._room = WaitingRoom(max_waiting=engine.max_waiting_requests, max_bypasses=engine.max_bypasses)
        self._room_tried_at: tuple[int, int] | None = None
        self._emit = emit
        self._requests: dict[str, _Request] = {}
        self._outputs: Outputs = defaultdict(list)
        self.live_requests = 0

    def reserve(self, core: EngineCore, entry: WaitingReservation) -> None:
        """Queues a reservation; its answer comes at once if there is room.

        Raises ResourceExhaustedError when too many wait. What can never fit is the answer's error.
        """
        self._room.add(entry)
        self._room_tried_at = None
        self._grant(core, entry.arrived_s)

    def abort(
        self, core: EngineCore, engine_id: str, coordinator_id: str, no_writer: bool, now: float
    ) -> bool:
        """Ends a request in any state at its coordinator's wish; whether it was alive."""
        if self._room.remove(engine_id):
            return True
        alive = engine_id in self._requests
        if alive and self._requests[engine_id].local is not None:
            del self._requests[engine_id]
            return core.abort(engine_id)
        self._apply(core, self._table.abort(engine_id, coordinator_id, no_writer, now), silent=True)
        return alive

    def coordinator_lost(self, core: EngineCore, coordinator_id: str, now: float) -> None:
        """Nobody reads this coordinator's outputs any more: all its requests end.

        The coordinator treats a broken stream in the same way, so nothing is lost by not waiting.
        """
        self._room.remove_coordinator(coordinator_id)
        for engine_id in [key for key, r in self._requests.items() if r.coordinator_id == coordinator_id]:
            self.abort(core, engine_id, coordinator_id, False, now)

    def writers_lost(self, agent_ids: Sequence[str], now: float) -> None:
        """The processes of these prefill workers have ended for certain."""
        for agent_id in agent_ids:
            self._table.writer_lost(agent_id, now)

    def before_step(self, core: EngineCore, now: float) -> bool:
        """Admits what has arrived, expires what is late, serves waiting reservations.

        True while completions are awaited or reservations wait.
        """
        for agent_id, message in self._transport.poll().notifications:
            self._on_notification(core, agent_id, message, now)
        self._apply(core, self._table.expire(now), silent=False)
        self._room.expire(now)
        self._grant(core, now)
        self._publish(core)
        return self.transfers_in_flight > 0 or len(self._room) > 0 or self._transport.needs_poll

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        """Turns a step's outputs into messages for their coordinators."""
        for engine_id in result.started:
            request, began_s = self._requests.get(engine_id), now - result.duration_s
            if request is None:
                continue
            if request.local is not None:
                request.local.began_s = began_s
            elif request.admitted_s is not None:
                request.admit_ms = max(0.0, began_s - request.admitted_s) * 1e3
                self._table.started(engine_id)
        for output in result.outputs:
            self._on_output(core, output, now)
        self._publish(core)

    def close(self) -> None:
        """Ends the transport; called last, on the engine thread."""
        self._transport.close()

    def _grant(self, core: EngineCore, now: float) -> None:
        load = core.load()
        state = (load.free_blocks, load.running_requests)
        # Looking a prompt up in the prefix cache costs time; nothing changes while no block came free.
        if not len(self._room) or state == self._room_tried_at:
            return
        self._room.grant(lambda entry: self._try_reserve(core, entry, now))
        self._room_tried_at = state

    def _try_reserve(self, core: EngineCore, entry: WaitingReservation, now: float) -> bool:
        request = entry.request
        try:
            if self._try_compute(core, entry, now):
                return True
            number = self._table.next_number
            blocks = core.reserve(request, number)
            if blocks is None:
                return False
        except SplitserveError as error:
            entry.answer(error)
            return True
        count = len(blocks.block_ids)
        ticket_end = now + self._ticket_s
        self._table.open(
            request.request_id,
            entry.coordinator_id,
            count,
            self._block_bytes,
            request.deadline_s,
            now,
            ticket_deadline_s=ticket_end,
        )
        if entry.writer_agent_id:
            self._table.note_writer(number, entry.writer_agent_id)
        self._requests[request.request_id] = _Request(
            entry.coordinator_id, request.request_id.partition("/")[2], blocks.block_ids
        )
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
        )
        self._verifier.expect(number, blocks.block_ids)
        entry.answer(Granted(ticket, max(0.0, now - entry.arrived_s)))
        return True

    def _try_compute(self, core: EngineCore, entry: WaitingReservation, now: float) -> bool:
        """Takes a prompt as an ordinary request if little enough of it is missing in the prefix cache."""
        request = entry.request
        if not entry.local_prefill_tokens:
            return False
        cached = core.cached_tokens(request)
        if len(request.token_ids) - cached > entry.local_prefill_tokens:
            return False
        core.add_request(request)
        self._requests[request.request_id] = _Request(
            entry.coordinator_id,
            request.request_id.partition("/")[2],
            local=_LocalPrefill(entry.arrived_s, cached),
        )
        entry.answer(Granted(None, max(0.0, now - entry.arrived_s)))
        return True

    def _on_notification(self, core: EngineCore, agent_id: str, message: bytes, now: float) -> None:
        verdict = self._table.on_notification(agent_id, message, now)
        if isinstance(verdict, Admit):
            # While the writer has its hold on the blocks, nobody else can have got them.
            self._wire.unpack(self._requests[verdict.request_id].received_blocks)
            core.release_writer(verdict.number)
            self._admit(core, verdict, now)
        elif isinstance(verdict, WriterDone):
            core.release_writer(verdict.number)
            self._apply(core, verdict.actions, silent=False)
        else:
            log_event("handoff.rejected", agent_id=agent_id, reason=verdict.reason)
            self._apply(core, verdict.actions, silent=False)

    def _admit(self, core: EngineCore, verdict: Admit, now: float) -> None:
        request = self._requests[verdict.request_id]
        request.admitted_s = now
        try:
            output = core.admit(verdict.number, verdict.first_token)
        except SplitserveError as error:
            core.abort(verdict.request_id)
            self._table.finished(verdict.request_id)
            self._fail(verdict.request_id, error.reason, error.message)
            return
        self.handoffs_completed += 1
        log_event(
            "handoff.admitted",
            level=logging.DEBUG,
            request_id=request.public_id,
            admitted_s=time.monotonic(),
        )
        admitted = decode_pb2.SequenceOutput(request_id=request.public_id, admitted=True)
        self._outputs[request.coordinator_id].append(admitted)
        if output is not None:
            self._on_output(core, output, now)

    def _apply(self, core: EngineCore, actions: list[Action] | tuple[Action, ...], *, silent: bool) -> None:
        for action in actions:
            match action:
                case Abort():
                    self._verifier.forget(action.number)
                    core.abort(action.request_id)
                    if not action.writer_alive:
                        core.release_writer(action.number)
                    if silent:
                        self._requests.pop(action.request_id, None)
                    else:
                        self._fail(action.request_id, action.reason, action.message)
                case ReleaseWriter():
                    core.release_writer(action.number)
                case Fence():
                    # The spent reservation rejects what may still come; cutting the peer off would also
                    # drop the completions of its other requests.
                    log_event("handoff.writer_silent", agent_id=action.agent_id, reservation=action.number)

    def _on_output(self, core: EngineCore, output: RequestOutput, now: float) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        if output.failure is not None and request.admitted_s is None and request.local is None:
            # The engine gave up what was only reserved: the writer may still be writing.
            aborted = self._table.abort(output.request_id, request.coordinator_id, False, now)
            self._apply(core, aborted, silent=True)
            self._requests[output.request_id] = request
        elif output.finish_reason is not None:
            self._table.finished(output.request_id)
        message = decode_pb2.SequenceOutput(request_id=request.public_id, delta=output_delta(output))
        if request.admit_ms is not None:
            message.admit_ms, request.admit_ms = request.admit_ms, None
        if (local := request.local) is not None and not local.reported:
            local.reported = True
            message.local_prefill.cached_tokens = local.cached_tokens
            message.local_prefill.queue_ms = max(0.0, local.began_s - local.arrived_s) * 1e3
            message.local_prefill.compute_ms = (now - local.began_s) * 1e3
        if output.failure is not None:
            message.failure.reason, message.failure.message = output.failure
        self._outputs[request.coordinator_id].append(message)
        if output.finish_reason is not None:
            del self._requests[output.request_id]

    def _fail(self, engine_id: str, reason: str, text: str) -> None:
        request = self._requests.pop(engine_id, None)
        if request is None:
            return
        failed = RequestOutput(engine_id, 0, finish_reason=FinishReason.ABORT)
        message = decode_pb2.SequenceOutput(request_id=request.public_id, delta=output_delta(failed))
        message.failure.reason, message.failure.message = reason, text
        self._outputs[request.coordinator_id].append(message)

    def _publish(self, core: EngineCore) -> None:
        self.load = core.load()
        self.waiting_reservations = len(self._room)
        self.live_requests = len(self._requests)
        self.transfers_in_flight = self._table.awaited_writers
        rejected = sum(self._table.counters.values())
        if rejected != self.rejected_handoffs:
            self.rejected_handoffs, self.handoffs_rejected = rejected, dict(self._table.counters)
        if self._outputs:
            outputs, self._outputs = self._outputs, defaultdict(list)
            self._emit(outputs)
