"""The prefill worker on the engine thread: every finished chunk's blocks go out under the ticket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.build import EngineParts
from engine.core import EngineCore
from engine.host import RoleListener
from engine.types import ChunkProgress, EngineRequest, RequestOutput, StepResult
from kv_transfer.push import KvPusher, PushDone, PushDrained, PushFailed
from kv_transfer.ticket import KvTicket
from kv_transfer.transport import TransferEndpoint
from prefill_worker.events import Failed, FirstTokenReady, HandedOff, PrefillEvent
from prefill_worker.peer_lanes import PeerLanes
from splitserve.errors import FailedPreconditionError, SplitserveError
from splitserve.logs import log_event
from splitserve.rpc_errors import failure_error

TOKEN_FIRST_S = 100e-6
"""What a first token needs to get out of this process."""

Emit = Callable[[list[tuple[str, PrefillEvent]]], None]


@dataclass(slots=True)
class _Prefill:
    """One request between its arrival and the release of its blocks."""

    ticket: KvTicket | None
    arrived_s: float
    began_s: float = 0.0
    cached_tokens: int = 0
    over: bool = False
    """The client has got its last event; only blocks are still held."""


class PushListener(RoleListener):
    """Joins the engine's steps with the pusher's writes. All methods run on the engine thread.

    Blocks of a request stay held in the engine until nothing of it is in flight any more: source memory
    of a write must not change before the write is over.
    """

    def __init__(
        self, parts: EngineParts, emit: Emit, on_peers_changed: Callable[[], None] = lambda: None
    ) -> None:
        config = parts.config
        self.endpoint = parts.endpoint
        self._transport = parts.transport
        self._pusher = KvPusher(parts.transport, parts.runner.wire)
        self._peers = PeerLanes(
            parts.transport, parts.endpoint, config.expected_lane_gb_per_s, config.lane_policy
        )
        self._emit = emit
        self._on_peers_changed = on_peers_changed
        self.usable: frozenset[str] = frozenset()
        """Agent ids that requests may be sent to: connected, measured, not refused."""
        self._live: dict[str, _Prefill] = {}
        self._endpoints: dict[str, TransferEndpoint] = {}
        self._events: list[tuple[str, PrefillEvent]] = []

    def start(self, core: EngineCore, request: EngineRequest, ticket: KvTicket | None, now: float) -> None:
        """Queues a prompt.

        Raises FailedPreconditionError or InvalidArgumentError naming the field for a ticket that must not be
        used here, and what `EngineCore.add_request` raises; the decode worker is then told that nothing
        will be written.
        """
        if ticket is not None:
            self._pusher.start(request.request_id, ticket, self._target(ticket), now)
        try:
            core.add_request(request)
        except SplitserveError:
            self._pusher.abort(request.request_id)
            raise
        self._live[request.request_id] = _Prefill(ticket, now)

    def end(self, core: EngineCore, request_id: str, ticket: KvTicket | None, now: float) -> None:
        """Nobody waits for this request: stops computing at the next chunk, lets the writes in flight end.

        A ticket that was never taken on is given back. Idempotent.
        """
        if (prefill := self._live.get(request_id)) is not None:
            core.abort(request_id)
            self._end(core, request_id, prefill)
        elif ticket is not None and ticket.writer_agent_id == self.endpoint.agent_id:
            self._pusher.decline(ticket, now)

    def connect(self, endpoint: TransferEndpoint) -> None:
        """Makes a decode worker's pool writable; failures are logged, for the next list brings it again."""
        try:
            self._transport.connect(endpoint)
            self._endpoints[endpoint.agent_id] = endpoint
            self._peers.connected(endpoint)
        except SplitserveError as error:
            log_event("peer.refused", agent_id=endpoint.agent_id, reason=error.reason, error=error.message)

    def retire(self, agent_id: str) -> None:
        """Takes no more tickets for a decode worker, which is still told how the pushes to it end."""
        self._endpoints.pop(agent_id, None)
        self._peers.lost(agent_id)

    def disconnect(self, agent_id: str) -> None:
        """Fences a decode worker that is gone."""
        self.retire(agent_id)
        self._pusher.peer_lost(agent_id)

    def targets(self) -> frozenset[str]:
        """Agent ids that tickets may name; `usable` are those of them that they should."""
        return self._transport.connected() & self._endpoints.keys()

    def before_step(self, core: EngineCore, now: float) -> bool:
        """Collects finished writes; True while any handoff or measurement is under way."""
        self._collect(core, now)
        self.load = core.load()
        self._flush()
        return self._pusher.active > 0 or self._peers.measuring or self._transport.needs_poll

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        """Reports first tokens, then posts the writes of the chunks that became final."""
        if result.progress and self._pusher.in_flight:
            self._collect(
                core, now
            )  # the last chunk need not wait for an earlier one that has ended meanwhile
        for request_id in result.started:
            if prefill := self._live.get(request_id):
                prefill.began_s = now - result.duration_s
        for progress in result.progress:
            if prefill := self._live.get(progress.request_id):
                prefill.cached_tokens = progress.cached_tokens
        for output in result.outputs:
            self._on_output(core, output, now)
        if self._events and result.progress and self._pusher.active:
            self._flush()
            # Where a write is a copy by this thread, the token would wait for its end on the one core of both.
            time.sleep(TOKEN_FIRST_S)
        outputs = {output.request_id: output for output in result.outputs}
        for progress in result.progress:
            self._on_progress(progress, outputs.get(progress.request_id), now)
        self.load = core.load()
        self._flush()

    def close(self) -> None:
        """Ends the transport; called last, on the engine thread."""
        self._transport.close()

    def _target(self, ticket: KvTicket) -> TransferEndpoint:
        """Where a ticket leads. Raises FailedPreconditionError: not this worker's ticket, or no such peer."""
        if ticket.writer_agent_id not in ("", self.endpoint.agent_id):
            raise FailedPreconditionError(
                f"the ticket is agent {ticket.writer_agent_id}'s",
                reason="TICKET_FOREIGN",
                field="ticket.writer_agent_id",
            )
        endpoint = self._endpoints.get(ticket.decode_agent_id)
        if endpoint is None:
            raise FailedPreconditionError(
                f"decode agent {ticket.decode_agent_id} is not connected here",
                reason="UNKNOWN_PEER",
                field="ticket.decode_agent_id",
            )
        self._peers.require_not_refused(ticket.decode_agent_id)
        return endpoint

    def _on_progress(self, progress: ChunkProgress, output: RequestOutput | None, now: float) -> None:
        prefill = self._live.get(progress.request_id)
        if prefill is None or prefill.over:
            return
        if prefill.ticket is None or (output is not None and output.finish_reason is not None):
            return  # nothing goes on elsewhere
        first_token = output.token_ids[0] if output is not None and output.token_ids else None
        self._pusher.on_progress(
            progress.request_id,
            progress.end,
            progress.block_ids,
            is_last=first_token is not None,
            first_token=first_token,
            now=now,
        )

    def _on_output(self, core: EngineCore, output: RequestOutput, now: float) -> None:
        prefill = self._live.get(output.request_id)
        if prefill is None or prefill.over:
            return
        if output.failure is not None:
            self._events.append((output.request_id, Failed(failure_error(*output.failure))))
            self._end(core, output.request_id, prefill)
            return
        last = prefill.ticket is None or output.finish_reason is not None
        event = FirstTokenReady(
            output,
            prefill.cached_tokens,
            queue_s=prefill.began_s - prefill.arrived_s,
            compute_s=now - prefill.began_s,
            last=last,
        )
        self._events.append((output.request_id, event))
        if last:
            self._end(core, output.request_id, prefill)

    def _collect(self, core: EngineCore, now: float) -> None:
        for event in self._pusher.poll(now, self._peers.poll()):
            self._on_push(core, event)
            if isinstance(event, PushDone):
                log_event(
                    "handoff.written",
                    level=logging.DEBUG,
                    request_id=event.request_id,
                    bytes=event.written_bytes,
                    descriptors=event.descriptors,
                    contiguous_runs=event.contiguous_runs,
                    computed_s=now - event.transfer_s,
                    written_s=now,
                )

    def _on_push(self, core: EngineCore, event: PushDone | PushFailed | PushDrained) -> None:
        prefill = self._live.pop(event.request_id, None)
        core.abort(event.request_id)
        core.release_held(event.request_id)
        if prefill is None or prefill.over:
            return
        if isinstance(event, PushDone):
            self.handoffs_completed += 1
            self.handoff_bytes += event.written_bytes
            done = HandedOff(event.written_bytes, event.descriptors, event.transfer_s)
            self._events.append((event.request_id, done))
        elif isinstance(event, PushFailed):
            self.handoffs_rejected = {
                **self.handoffs_rejected,
                event.reason: self.handoffs_rejected.get(event.reason, 0) + 1,
            }
            error = failure_error(event.reason, event.message)
            self._events.append((event.request_id, Failed(error)))

    def _end(self, core: EngineCore, request_id: str, prefill: _Prefill) -> None:
        prefill.over = True
        if prefill.ticket is not None:
            self._pusher.abort(request_id)  # its last event releases the blocks
            return
        del self._live[request_id]
        core.release_held(request_id)

    def _flush(self) -> None:
        self.transfers_in_flight = self._pusher.in_flight
        usable, lanes = self._peers.usable(), self._peers.lanes()
        if (usable, lanes) != (self.usable, self.lanes):
            self.usable, self.lanes = usable, lanes
            self._on_peers_changed()
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
