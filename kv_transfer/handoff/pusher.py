"""Prefill side of a handoff: writes finished KV blocks while later chunks are still being computed.

Runs on the engine thread with that thread's transport. `now` is monotonic time in seconds, read right
before each call. Invariants:

* A block is written exactly once, when its KV is final: the block is full, or it is the prompt's last.
* Writes are not ordered among each other, so the last write, which carries the completion, is posted only
  after all earlier ones were reported done.
* Nothing is posted after the ticket's deadline. Writes in flight at that point get `WRITE_GRACE_S`; then
  the peer is disconnected, which ends them. The decode worker relies on this bound.
* Every request ends with exactly one of PushDone, PushFailed and PushDrained. By then each of its writes was
  reported, so its source blocks may be freed: what a write in doubt still reads from them lands in blocks in
  quarantine.
* `Drained` is said only with proof: every posted write ended well. After a write in doubt nothing is said, the
  quarantine runs its full time, and the peer is disconnected as soon as that costs no other request its
  handoff, `WRITE_GRACE_S` after the deadline at the latest.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kv_transfer.handoff.checksums import KvMemory, fold_digests, verified_positions
from kv_transfer.handoff.messages import (
    WRITE_GRACE_S,
    Drained,
    KvTicket,
    WriteCompletion,
    encode,
    refused_ticket,
)
from kv_transfer.transports.regions import merge_runs
from kv_transfer.transports.transport import TransferEndpoint, Transport, WriteResult
from splitserve.errors import InvalidArgumentError, SplitserveError, TransferError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.rpc.status import request_error


@dataclass(frozen=True, slots=True)
class PushDone:
    """All bytes and the completion are delivered.

    `transfer_s` is the time in seconds from the last chunk's progress report to the last write's acknowledgement.
    """

    request_id: str
    written_bytes: int
    descriptors: int
    contiguous_runs: int
    """Contiguous runs of the whole handoff; fewer than `descriptors` where a chunk boundary splits a run."""
    transfer_s: float


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The handoff failed. The decode worker has been notified if it is reachable and no write is in doubt."""

    request_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """An aborted handoff posts nothing more; all its writes were reported."""

    request_id: str


PushEvent = PushDone | PushFailed | PushDrained


@dataclass(slots=True)
class BlockWrite:
    """When one write was posted, and when a poll found it ended, in seconds; 0: it has not ended."""

    began_s: float
    blocks: int
    descriptors: int
    ended_s: float = 0.0


@dataclass(slots=True)
class Push:
    """One handoff from its ticket to its terminal event. Used by the pusher only."""

    request_id: str
    ticket: KvTicket
    block_table: Sequence[int] = ()
    """Local blocks, paired by position with the ticket's; grows with each chunk."""
    ready_blocks: int = 0
    """Leading blocks of `block_table` whose KV is final."""
    posted_blocks: int = 0
    """Leading blocks of `block_table` whose writes were posted."""
    digests: list[int] = field(default_factory=list)
    """Checksums of the verified blocks that are final."""
    descriptors: int = 0
    writes: set[int] = field(default_factory=set)
    """Handles of the writes in flight."""
    first_token: int | None = None
    last_chunk_s: float | None = None
    """When the last chunk was reported; None until then."""
    completing: bool = False
    """The completion was posted."""
    aborted: bool = False
    failure: SplitserveError | None = None
    observed: dict[int, BlockWrite] | None = None
    """All writes of the push by handle, for the caller of `KvPusher.start`; None: the caller does not want them."""
    in_doubt: bool = False
    """A write failed, and bytes of it may still arrive: the decode worker must not be told otherwise."""

    @property
    def stopped(self) -> bool:
        """Whether no further write may be posted."""
        return self.aborted or self.failure is not None

    @property
    def idle(self) -> bool:
        """Whether it waits for the next chunk or its deadline, so that polling it has no effect."""
        awaits_chunk = self.last_chunk_s is None and self.posted_blocks == self.ready_blocks
        return awaits_chunk and not self.writes and not self.stopped


REMEMBER_S = 60.0
"""How long past its deadline a used ticket is remembered individually. After that its number becomes the floor
of its owner, at and below which all tickets are refused."""
MAX_OWNERS = 4096


class SpentTickets:
    """Used tickets per decode agent. Memory is bounded by the tickets of the last `REMEMBER_S` plus lifetime."""

    def __init__(self) -> None:
        self._spent: dict[str, set[int]] = {}
        self._floors: dict[str, int] = {}
        self._ends: list[tuple[float, str, int]] = []

    def spend(self, agent_id: str, reservation: int, deadline_s: float, now: float) -> bool:
        """Marks a ticket as used; returns False, without effect, if it was used before."""
        self._forget(now)
        numbers = self._spent.get(agent_id, set())
        if reservation in numbers or reservation <= self._floors.get(agent_id, 0):
            return False
        self._spent.setdefault(agent_id, numbers).add(reservation)
        heapq.heappush(self._ends, (deadline_s + REMEMBER_S, agent_id, reservation))
        return True

    def _forget(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, agent_id, reservation = heapq.heappop(self._ends)
            numbers = self._spent[agent_id]
            numbers.discard(reservation)
            if not numbers:
                del self._spent[agent_id]
            # Reinserted, so that the least recently used agent comes first and is evicted first.
            self._floors[agent_id] = max(reservation, self._floors.pop(agent_id, 0))
        while len(self._floors) > MAX_OWNERS:
            del self._floors[next(iter(self._floors))]


class KvPusher:
    """All pushes of one worker, out of `kv_memory` over one transport."""

    def __init__(self, transport: Transport, kv_memory: KvMemory) -> None:
        self._transport = transport
        self._kv_memory = kv_memory
        self._block_tokens = kv_memory.region.layout.block_size_tokens
        self._pushes: dict[str, Push] = {}
        self._runnable: dict[str, Push] = {}
        """Superset of the pushes that are not idle; keeps `poll` independent of the number of waiting requests."""
        self._deadlines: list[tuple[float, str]] = []
        self._push_of_write: dict[int, Push] = {}
        self._doubts: dict[str, float] = {}
        """Peers with writes in doubt, and when they are disconnected at the latest."""
        self._cut_off: list[str] = []
        self._spent = SpentTickets()

    @property
    def in_flight(self) -> int:
        """Number of writes posted and not yet done."""
        return len(self._push_of_write)

    @property
    def active(self) -> int:
        """Number of requests without a terminal event."""
        return len(self._pushes)

    def start(
        self,
        request_id: str,
        ticket: KvTicket,
        endpoint: TransferEndpoint,
        now: float,
        observed: dict[int, BlockWrite] | None = None,
    ) -> None:
        """Accepts a ticket on arrival. From then on the decode worker is notified however the request ends.

        `observed` gets the writes of this push by handle. Raises InvalidArgumentError for a ticket that does not fit
        the endpoint or a known request id, and FailedPreconditionError if the ticket's agent is not a connected peer
        (UNKNOWN_PEER) or the ticket was used before (TICKET_USED).
        """
        if request_id in self._pushes:
            raise InvalidArgumentError(f"request {request_id} is being pushed already", field="request_id")
        agent_id = ticket.decode_agent_id
        if endpoint.agent_id != agent_id or agent_id not in self._transport.connected():
            message = f"decode agent {agent_id} is not connected"
            raise refused_ticket("UNKNOWN_PEER", "decode_agent_id", message)
        ticket.require_fits(endpoint.memory)
        if not self._spent.spend(agent_id, ticket.reservation, ticket.deadline_s, now):
            message = f"ticket {ticket.reservation} of agent {agent_id} was used before"
            raise refused_ticket("TICKET_USED", "reservation", message)
        push = Push(request_id, ticket, observed=observed)
        self._pushes[request_id] = self._runnable[request_id] = push
        heapq.heappush(self._deadlines, (ticket.deadline_s, request_id))
        self._enforce_deadline(push, now)

    def decline(self, ticket: KvTicket, now: float) -> None:
        """Notifies a ticket's owner that the ticket will not be used; no effect on a used ticket."""
        if self._spent.spend(ticket.decode_agent_id, ticket.reservation, ticket.deadline_s, now):
            self._send_drained(ticket)

    def on_progress(
        self,
        request_id: str,
        end_tokens: int,
        block_ids: Sequence[int],
        is_last: bool,
        first_token: int | None,
        now: float,
        group_blocks: Sequence[int] = (),
    ) -> None:
        """KV of tokens [0, `end_tokens`) is final in `block_ids`, the sequence's whole block table.

        Posts the blocks that became full. With `is_last`, posts all remaining blocks and the completion with
        `first_token`, which is then required. Ended and unknown requests are ignored. The blocks must not
        change until the terminal event. Groups of layers with blocks of their own (`group_blocks` as in
        `ChunkProgress`) are sent whole with the last chunk.
        """
        push = self._pushes.get(request_id)
        if push is None or push.stopped or push.last_chunk_s is not None:
            return
        # The ticket covers the prompt's blocks after those that the decode worker has cached.
        ticket, size = push.ticket, self._block_tokens
        self._runnable[request_id] = push
        if group_blocks:
            if is_last:
                self._take_groups(push, block_ids, group_blocks, first_token, now)
            return
        wanted, cached = len(ticket.block_indices), ticket.cached_tokens // size
        push.block_table = block_ids[cached : cached + wanted]
        filled = blocks_for(end_tokens, size)
        final = filled if is_last else end_tokens // size
        push.ready_blocks = max(0, min(final - cached, wanted))
        if len(push.block_table) < push.ready_blocks or (is_last and filled - cached != wanted):
            push.failure = InvalidArgumentError(
                f"the ticket holds {wanted} blocks after {cached} cached ones, the prompt fills {filled}",
                reason="TICKET_MISMATCH",
                field="ticket.block_indices",
            )
        elif is_last:
            if first_token is None:
                raise InvalidArgumentError("the last chunk needs its first token", field="first_token")
            push.last_chunk_s, push.first_token = now, first_token
        if push.failure is None:
            # Hashed only now: before a block is final its bytes still change.
            try:
                self._digest_ready_blocks(push)
            except BaseException as error:
                push.failure = _transfer_error(error, request_id)
        self._advance(push, now)

    def _take_groups(
        self,
        push: Push,
        block_ids: Sequence[int],
        group_blocks: Sequence[int],
        first_token: int | None,
        now: float,
    ) -> None:
        """All KV is final. The ticket asks for the last blocks of each group of layers."""
        wanted = push.ticket.group_blocks
        if len(wanted) != len(group_blocks) or any(map(operator.gt, wanted, group_blocks)):
            push.failure = InvalidArgumentError(
                f"the ticket asks for {list(wanted)} blocks of the groups of layers, here are {list(group_blocks)}",
                reason="TICKET_MISMATCH",
                field="ticket.group_blocks",
            )
        else:
            ends = accumulate(group_blocks)
            groups = zip(wanted, ends, strict=True)
            push.block_table = [block for count, end in groups for block in block_ids[end - count : end]]
            push.ready_blocks = len(push.block_table)
            push.last_chunk_s, push.first_token = now, first_token
        self._advance(push, now)

    def abort(self, request_id: str) -> None:
        """Posts no more writes; `poll` reports PushDrained once those in flight are done.

        A completion that was posted already still ends in PushDone. Unknown ids are ignored.
        """
        if push := self._pushes.get(request_id):
            push.aborted = True
            self._runnable[request_id] = push

    def peer_lost(self, agent_id: str) -> None:
        """Disconnects a lost decode worker, and refuses what it sends; the next `poll` fails its requests with
        PEER_LOST."""
        self._transport.disconnect(agent_id)
        self._transport.refuse(agent_id)
        for push in self._pushes.values():
            if push.ticket.decode_agent_id == agent_id and push.failure is None:
                push.failure = TransferError(f"decode agent {agent_id} is gone", reason="PEER_LOST")
                self._runnable[push.request_id] = push

    def poll(self, now: float, ended: Sequence[WriteResult]) -> list[PushEvent]:
        """Takes the writes that have ended, posts what waited for them and returns terminal events.

        The cost is proportional to the requests being computed or written, not to those that wait.
        """
        for write in ended:
            push = self._push_of_write.pop(write.handle, None)
            if push is None:
                continue
            push.writes.discard(write.handle)
            if push.observed is not None:
                push.observed[write.handle].ended_s = now
            push.in_doubt = push.in_doubt or write.in_doubt
            if write.error is not None and push.failure is None:
                push.failure = TransferError(f"a write of {push.request_id} failed: {write.error}")
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if push := self._pushes.get(request_id):
                self._runnable[request_id] = push
        events: list[PushEvent] = []
        for push in list(self._runnable.values()):
            self._advance(push, now)
            if event := self._terminal_event(push, now):
                del self._pushes[push.request_id]
                events.append(event)
            if event or push.idle:
                del self._runnable[push.request_id]
        if self._doubts:
            self._cut_doubtful(now)
        return events

    def take_cut_off(self) -> list[str]:
        """Peers that were disconnected since the last call to end writes in doubt. They may be connected again."""
        cut_off, self._cut_off = self._cut_off, []
        return cut_off

    def _advance(self, push: Push, now: float) -> None:
        """Posts everything that may be posted now."""
        if push.completing and not push.writes:
            return  # complete; `poll` reports it
        self._enforce_deadline(push, now)
        if push.stopped or push.completing:
            return
        try:
            if push.last_chunk_s is None:
                self._write(push, None, now)
            elif not push.writes:
                # The blocks of the last chunk, or only the notification if there are none.
                push.completing = True
                self._complete(push, now)
        except BaseException as error:
            push.failure, push.completing = _transfer_error(error, push.request_id), False

    def _write(self, push: Push, notification: bytes | None, now: float) -> None:
        if push.posted_blocks == push.ready_blocks:
            return
        ticket, before = push.ticket, self._transport.descriptors_posted
        part = slice(push.posted_blocks, push.ready_blocks)
        handle = self._transport.write(
            ticket.decode_agent_id,
            push.block_table[part],
            ticket.block_indices[part],
            notification,
            ticket.group_blocks,
        )
        descriptors = self._transport.descriptors_posted - before
        push.descriptors += descriptors
        if push.observed is not None:
            push.observed[handle] = BlockWrite(now, part.stop - part.start, descriptors)
        push.posted_blocks = push.ready_blocks
        push.writes.add(handle)
        self._push_of_write[handle] = push

    def _complete(self, push: Push, now: float) -> None:
        ticket = push.ticket
        assert push.first_token is not None
        done = encode(
            WriteCompletion(
                ticket.epoch,
                ticket.reservation,
                ticket.total_bytes,
                push.first_token,
                fold_digests(push.digests),
            )
        )
        if push.posted_blocks < push.ready_blocks:
            self._write(push, done, now)
        else:
            self._transport.notify(ticket.decode_agent_id, done)

    def _digest_ready_blocks(self, push: Push) -> None:
        """Hashes the verified blocks that became final: chunk by chunk, to spread the cost over the steps."""
        ticket = push.ticket
        count, one_in = len(ticket.block_indices), ticket.verify_one_in
        verified = verified_positions(ticket.epoch, ticket.reservation, count, one_in)
        final = [push.block_table[p] for p in verified[len(push.digests) :] if p < push.ready_blocks]
        push.digests += self._kv_memory.digests(final)

    def _enforce_deadline(self, push: Push, now: float) -> None:
        """Stops a push at its ticket's deadline; after the grace period ends its writes by disconnecting the peer."""
        deadline_s = push.ticket.deadline_s
        if now >= deadline_s and not push.stopped and not push.completing:
            push.failure = TransferError(
                f"the ticket of {push.request_id} ran out before its handoff was complete",
                reason="TICKET_EXPIRED",
            )
        if now >= deadline_s + WRITE_GRACE_S and push.writes:
            self._transport.disconnect(push.ticket.decode_agent_id)

    def _terminal_event(self, push: Push, now: float) -> PushEvent | None:
        """The terminal event of a finished push with nothing in flight, else None."""
        if push.writes:
            return None
        ticket = push.ticket
        if push.completing and push.failure is None:
            assert push.last_chunk_s is not None
            runs = len(merge_runs(push.block_table, ticket.block_indices))
            transfer_s = now - push.last_chunk_s
            return PushDone(push.request_id, ticket.total_bytes, push.descriptors, runs, transfer_s)
        if not push.stopped:
            return None
        if push.in_doubt:
            end_s, agent_id = ticket.deadline_s + WRITE_GRACE_S, ticket.decode_agent_id
            self._doubts[agent_id] = min(end_s, self._doubts.get(agent_id, end_s))
        else:
            self._send_drained(ticket)
        if push.aborted:
            return PushDrained(push.request_id)
        assert push.failure is not None
        return PushFailed(push.request_id, push.failure.reason, push.failure.message)

    def _cut_doubtful(self, now: float) -> None:
        """Ends writes in doubt by disconnecting their peers, once no other request is pushed to them or time is up."""
        busy = {push.ticket.decode_agent_id for push in self._pushes.values()}
        for agent_id, end_s in list(self._doubts.items()):
            if agent_id not in busy or now >= end_s:
                del self._doubts[agent_id]
                self._transport.disconnect(agent_id)
                self._cut_off.append(agent_id)

    def _send_drained(self, ticket: KvTicket) -> None:
        if ticket.decode_agent_id not in self._transport.connected():
            return
        try:
            self._transport.notify(ticket.decode_agent_id, encode(Drained(ticket.epoch, ticket.reservation)))
        except BaseException as error:
            # The peer is gone, and so are the blocks that the message would have freed.
            request_error(error, f"ticket {ticket.reservation}")


def _transfer_error(error: BaseException, request_id: str) -> SplitserveError:
    """As `request_error`; another pair may succeed where the error is not a refusal."""
    known = request_error(error, request_id)
    return known if known is error else TransferError(known.message)
