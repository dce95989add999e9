"""The prefill worker's side of a handoff: writes finished blocks while the rest is still computed.

Runs on the engine's thread, over the transport of that thread; time is an argument, to be read right
before each call. The rules it keeps:

* A block is written once, when it is final: full, or the prompt's last. Nothing is written twice.
* The completion rides on the last write, posted only when all earlier ones are reported done, because
  writes are not ordered among each other.
* Nothing is posted after the ticket's deadline. Writes that are then in flight get `WRITE_GRACE_S`;
  after that the peer is disconnected, which ends them. The decode worker counts on this.
* Every request ends with exactly one of PushDone, PushFailed and PushDrained, and then nothing of it is
  in flight: its source blocks may be freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.notification import Completion, Drained, encode
from kv_transfer.runs import merge_runs
from kv_transfer.spent_tickets import SpentTickets
from kv_transfer.ticket import WRITE_GRACE_S, KvTicket
from kv_transfer.transport import PollResult, TransferEndpoint, Transport
from kv_transfer.verify import digests_of, fold_digests, verified_positions
from kv_transfer.wire import KvWire
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError, TransferError


@dataclass(frozen=True, slots=True)
class PushDone:
    """Every byte and the completion are delivered.

    `transfer_s` runs from the last chunk's progress to the acknowledgement of the last write, in seconds.
    """

    request_id: str
    written_bytes: int
    descriptors: int
    contiguous_runs: int
    """Of the whole handoff: fewer than `descriptors` where chunks cut a run."""
    transfer_s: float


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The handoff did not happen; the decode worker was told so if it can be reached."""

    request_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """An aborted handoff is over."""

    request_id: str


PushEvent = PushDone | PushFailed | PushDrained


@dataclass(slots=True)
class _Push:
    request_id: str
    ticket: KvTicket
    block_size: int
    table: tuple[int, ...] = ()
    """Local blocks that pair with the ticket's, as far as known."""
    ready: int = 0
    """How many of the ticket's blocks are final here."""
    posted: int = 0
    digests: list[int] = field(default_factory=list)
    """Checksums of the blocks that the ticket chose, as far as they are final."""
    descriptors: int = 0
    handles: set[int] = field(default_factory=set)
    first_token: int | None = None
    last_at_s: float | None = None
    """When the last chunk was reported; None before."""
    completing: bool = False
    """The completion is on its way."""
    aborted: bool = False
    failure: SplitserveError | None = None

    @property
    def stopped(self) -> bool:
        return self.aborted or self.failure is not None

    @property
    def resting(self) -> bool:
        """Whether nothing can come of a look at it before more of it is computed or its time is up."""
        waits = self.last_at_s is None and self.posted == self.ready
        return waits and not self.handles and not self.stopped


class KvPusher:
    """All pushes of one worker over one transport.

    `wire` makes blocks ready to be sent, and reads them for tickets that ask for checksums; without it blocks
    are sent as they are, and completions of such tickets are refused.
    """

    def __init__(self, transport: Transport, wire: KvWire | None = None) -> None:
        self._transport = transport
        self._wire = wire
        self._pushes: dict[str, _Push] = {}
        self._moving: dict[str, _Push] = {}
        """Those of them that are not resting, and perhaps some that are; so a poll does not look at a long queue."""
        self._deadlines: list[tuple[float, str]] = []
        self._owner: dict[int, _Push] = {}
        self._spent = SpentTickets()

    @property
    def in_flight(self) -> int:
        """Writes posted and not yet over."""
        return len(self._owner)

    @property
    def active(self) -> int:
        """Requests without a terminal event."""
        return len(self._pushes)

    def start(self, request_id: str, ticket: KvTicket, endpoint: TransferEndpoint, now: float) -> None:
        """Takes a ticket on, at its arrival, so that `abort` can tell its owner from then on.

        Raises InvalidArgumentError for a ticket that does not fit the endpoint or a request known
        already, FailedPreconditionError when the ticket's agent is not the connected peer (UNKNOWN_PEER) or
        it was used before (TICKET_USED).
        """
        if request_id in self._pushes:
            raise InvalidArgumentError(f"request {request_id} is being pushed already", field="request_id")
        agent_id = ticket.decode_agent_id
        if endpoint.agent_id != agent_id or agent_id not in self._transport.connected():
            message, field_name = f"decode agent {agent_id} is not connected", "ticket.decode_agent_id"
            raise FailedPreconditionError(message, reason="UNKNOWN_PEER", field=field_name)
        ticket.require_fits(endpoint.pool)
        if not self._spent.spend(agent_id, ticket.reservation, ticket.deadline_s, now):
            message = f"ticket {ticket.reservation} of agent {agent_id} was used before"
            raise FailedPreconditionError(message, reason="TICKET_USED", field="ticket.reservation")
        push = _Push(request_id, ticket, endpoint.pool.layout.block_size_tokens)
        self._pushes[request_id] = self._moving[request_id] = push
        heapq.heappush(self._deadlines, (ticket.deadline_s, request_id))
        self._stop_if_late(push, now)

    def decline(self, ticket: KvTicket, now: float) -> None:
        """Tells a ticket's owner that it will not be used, unless it was or is."""
        if self._spent.spend(ticket.decode_agent_id, ticket.reservation, ticket.deadline_s, now):
            self._tell_drained(ticket)

    def on_progress(
        self,
        request_id: str,
        end_tokens: int,
        block_ids: Sequence[int],
        is_last: bool,
        first_token: int | None,
        now: float,
    ) -> None:
        """KV of tokens [0, `end_tokens`) is final in `block_ids`, the sequence's whole block table.

        Posts the blocks that became full; with `is_last`, all that remain and the completion with
        `first_token`, which is then required. Ended or unknown requests are ignored. The blocks must stay
        as they are until the terminal event.
        """
        push = self._pushes.get(request_id)
        if push is None or push.stopped or push.last_at_s is not None:
            return
        wanted, cached = len(push.ticket.block_indices), push.ticket.cached_tokens // push.block_size
        final = -(-end_tokens // push.block_size) if is_last else end_tokens // push.block_size
        self._moving[request_id] = push
        push.table = tuple(block_ids[cached : cached + wanted])
        known, push.ready = push.ready, max(0, min(final - cached, wanted))
        if len(push.table) < push.ready or (is_last and final - cached != wanted):
            push.failure = InvalidArgumentError(
                f"the ticket holds {wanted} blocks after {cached} cached ones, the prompt fills {final}",
                reason="TICKET_MISMATCH",
                field="ticket.block_indices",
            )
        elif is_last:
            if first_token is None:
                raise InvalidArgumentError("the last chunk needs its first token", field="first_token")
            push.last_at_s, push.first_token = now, first_token
        if self._wire is not None and push.failure is None:
            self._wire.pack(push.table[known : push.ready])
            self._take_digests(push, self._wire)
        self._advance(push, now)

    def abort(self, request_id: str) -> None:
        """Posts no more writes; `poll` reports PushDrained when those in flight are over.

        A completion that is on its way already still ends in PushDone. Unknown ids are ignored.
        """
        if push := self._pushes.get(request_id):
            push.aborted = True
            self._moving[request_id] = push

    def peer_lost(self, agent_id: str) -> None:
        """A decode worker is gone: disconnects it; the next `poll` fails its requests with PEER_LOST."""
        self._transport.disconnect(agent_id)
        for push in self._pushes.values():
            if push.ticket.decode_agent_id == agent_id and push.failure is None:
                push.failure = TransferError(f"decode agent {agent_id} is gone", reason="PEER_LOST")
                self._moving[push.request_id] = push

    def poll(self, now: float, polled: PollResult | None = None) -> list[PushEvent]:
        """Collects finished writes, posts what waited for them, reports the requests that are over.

        `polled` is what the transport's owner polled itself, for one that also receives; without it the
        transport is polled here and notifications, which nobody then waits for, are dropped. Costs O(1) for each
        request that is being computed or written, nothing for those that still wait.
        """
        result = polled if polled is not None else self._transport.poll()
        for write in result.writes:
            push = self._owner.pop(write.handle, None)
            if push is None:
                continue
            push.handles.discard(write.handle)
            if write.error is not None and push.failure is None:
                push.failure = TransferError(f"a write of {push.request_id} failed: {write.error}")
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if push := self._pushes.get(request_id):
                self._moving[request_id] = push
        events: list[PushEvent] = []
        for push in list(self._moving.values()):
            self._advance(push, now)
            if event := self._ending(push, now):
                del self._pushes[push.request_id]
                events.append(event)
            if event or push.resting:
                del self._moving[push.request_id]
        return events

    def _advance(self, push: _Push, now: float) -> None:
        """Posts what may be posted now."""
        if push.completing and not push.handles:
            return
        self._stop_if_late(push, now)
        if push.stopped or push.completing:
            return
        try:
            if push.last_at_s is None:
                self._write(push, None)
            elif not push.handles:
                push.completing = True
                self._complete(push)
        except SplitserveError as error:
            push.failure, push.completing = error, False

    def _write(self, push: _Push, notification: bytes | None) -> None:
        if push.posted == push.ready:
            return
        ticket, before = push.ticket, self._transport.descriptors_posted
        part = slice(push.posted, push.ready)
        handle = self._transport.write(
            ticket.decode_agent_id, push.table[part], ticket.block_indices[part], notification
        )
        push.descriptors += self._transport.descriptors_posted - before
        push.posted = push.ready
        push.handles.add(handle)
        self._owner[handle] = push

    def _complete(self, push: _Push) -> None:
        ticket = push.ticket
        assert push.first_token is not None
        checksums = fold_digests(push.digests)
        done = encode(
            Completion(ticket.epoch, ticket.reservation, ticket.total_bytes, push.first_token, checksums)
        )
        if push.posted < push.ready:
            self._write(push, done)
        else:
            self._transport.notify(ticket.decode_agent_id, done)

    def _take_digests(self, push: _Push, wire: KvWire) -> None:
        """Reads the blocks to be verified that became final; chunk by chunk, so that no step waits for all."""
        ticket = push.ticket
        count, one_in = len(ticket.block_indices), ticket.verify_one_in
        positions = verified_positions(ticket.epoch, ticket.reservation, count, one_in)
        final = [push.table[p] for p in positions[len(push.digests) :] if p < push.ready]
        push.digests += digests_of(wire.read_blocks(final))

    def _stop_if_late(self, push: _Push, now: float) -> None:
        """Stops a push at its deadline; ends its stuck writes by closing the connection after the grace."""
        deadline_s = push.ticket.deadline_s
        if now >= deadline_s and not push.stopped and not push.completing:
            push.failure = TransferError(
                f"the ticket of {push.request_id} ran out before its handoff was complete",
                reason="TICKET_EXPIRED",
            )
        if now >= deadline_s + WRITE_GRACE_S and push.handles:
            self._transport.disconnect(push.ticket.decode_agent_id)

    def _ending(self, push: _Push, now: float) -> PushEvent | None:
        """The terminal event of a push with nothing in flight, if it has come to its end."""
        if push.handles:
            return None
        ticket = push.ticket
        if push.completing and push.failure is None:
            assert push.last_at_s is not None
            runs, took_s = len(merge_runs(push.table, ticket.block_indices)), now - push.last_at_s
            return PushDone(push.request_id, ticket.total_bytes, push.descriptors, runs, took_s)
        if not push.stopped:
            return None
        self._tell_drained(ticket)
        if push.aborted:
            return PushDrained(push.request_id)
        assert push.failure is not None
        return PushFailed(push.request_id, push.failure.reason, push.failure.message)

    def _tell_drained(self, ticket: KvTicket) -> None:
        if ticket.decode_agent_id not in self._transport.connected():
            return
        try:
            self._transport.notify(ticket.decode_agent_id, encode(Drained(ticket.epoch, ticket.reservation)))
        except TransferError:
            return  # the peer is gone, and with it whatever the message would have freed
