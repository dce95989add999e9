"""The decode worker's reservations: which requests may use reserved blocks, which writers may write to them.

Pure: time is an argument in seconds, and each method returns the actions that its caller applies to the
engine and the transport. Poll the transport and pass its notifications on before calling `expire`.

Protection from late writes: a block leaves quarantine only when its writer has let go (completion or
drained), when the writer's process ended at least `WRITE_GRACE_S` ago (`writer_lost`), or when it can no
longer write. A writer posts nothing after its ticket's deadline and disconnects `WRITE_GRACE_S` later
(`KvPusher`); the quarantine lasts twice the grace beyond the deadline, to cover the ticket's travel time.
docs/decisions/0007-when-reserved-blocks-come-back.md has the full argument and its one remaining gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from kv_transfer.handoff import reservation as states
from kv_transfer.handoff.notification import BadNotification, Drained, WriteCompletion, decode
from kv_transfer.handoff.reservation import LIVE, WAITING, HandoffState, Reservation
from kv_transfer.handoff.reservation_actions import (
    REJECTION_REASONS,
    Abort,
    Action,
    Admit,
    Rejected,
    ReleaseWriter,
    Silence,
    Verdict,
    WriterDone,
)
from kv_transfer.handoff.ticket import WRITE_GRACE_S
from splitserve.errors import InvalidArgumentError

_MAX_LOST_WRITERS = 4096

Observer = Callable[[int, HandoffState, HandoffState], None]


class ReservationTable:
    """All reservations of one boot of a decode worker.

    `observer` is called with (number, from, to) on each transition. `content_matches` verifies checksums; it is
    called once, for a completion that passed all other checks. `orders`: those in which blocks may be written, beside
    the owner's own, which a completion does not name.
    """

    def __init__(
        self,
        epoch: int,
        *,
        lease_s: float,
        quarantine_s: float,
        observer: Observer | None = None,
        content_matches: Callable[[WriteCompletion], bool] = lambda _: True,
        orders: Set[str] = frozenset(),
    ) -> None:
        if epoch == 0:
            raise InvalidArgumentError("epoch must not be 0", field="epoch")
        self.epoch = epoch
        self.counters: Counter[str] = Counter(dict.fromkeys(REJECTION_REASONS, 0))
        self._lease_s = lease_s
        self._quarantine_s = quarantine_s
        self._observer = observer
        self._content_matches = content_matches
        self._orders = {"", *orders}
        self._last_number = 0
        self._open: dict[int, Reservation] = {}
        self._live: dict[str, int] = {}
        self._lease_ends: dict[str, float] = {}
        self._lost_writers: dict[str, float] = {}
        self._next_due_s = float("inf")

    def open(
        self,
        request_id: str,
        coordinator_id: str,
        block_count: int,
        block_bytes: int,
        deadline_s: float,
        now: float,
        ticket_deadline_s: float | None = None,
    ) -> int:
        """Records reserved blocks and returns the reservation number for the ticket.

        `deadline_s` is the request's deadline; `ticket_deadline_s`, at most and by default `deadline_s`, the
        ticket's. A shorter one returns the blocks of a dead writer sooner. Raises InvalidArgumentError if the
        request is live already or the deadline has passed.
        """
        if request_id in self._live:
            raise InvalidArgumentError(f"request {request_id} is live already", field="request_id")
        if deadline_s <= now:
            raise InvalidArgumentError("the deadline is past", field="timeout")
        self._last_number += 1
        ticket_end = deadline_s if ticket_deadline_s is None else min(ticket_deadline_s, deadline_s)
        size = block_count * block_bytes
        writer_end = ticket_end + 2 * WRITE_GRACE_S
        entry = Reservation(
            self._last_number, request_id, coordinator_id, block_count, size, deadline_s, writer_end
        )
        self._open[entry.number] = entry
        self._live[request_id] = entry.number
        self._next_due_s = min(self._next_due_s, entry.due_s)
        return entry.number

    @property
    def next_number(self) -> int:
        """The number that the next `open` returns."""
        return self._last_number + 1

    def bind_writer(self, number: int, agent_id: str) -> None:
        """Binds the reservation to the agent that received the ticket; notifications of others are refused."""
        entry = self._open.get(number)
        if entry is None or not entry.writer_alive:
            return
        entry.writer_agent_id = agent_id
        if entry.state is HandoffState.RESERVED:
            self._move(entry, states.receive)
        if (lost_s := self._lost_writers.get(agent_id)) is not None:
            self._lose_writer(entry, lost_s)

    def on_notification(
        self, agent_id: str, message: bytes | WriteCompletion | Drained, now: float
    ) -> Verdict:
        """Checks a peer's notification, from the cheapest check to the costliest, and applies it.

        A completion that arrives after the request's deadline is not admitted.
        """
        notice = decode(message) if isinstance(message, bytes) else message
        if isinstance(notice, BadNotification):
            return self._reject("malformed")
        if notice.epoch != self.epoch:
            return self._reject("stale_epoch")
        if not 0 < notice.reservation <= self._last_number:
            return self._reject("unknown_reservation")
        # The number was issued by this boot; a missing entry has ended.
        entry = self._open.get(notice.reservation)
        if entry is None:
            return self._reject("not_live")
        if entry.writer_agent_id not in (None, agent_id):
            return self._reject("foreign_writer")
        if not entry.writer_alive:
            return self._reject("duplicate")
        if isinstance(notice, Drained):
            return self._writer_done(entry, now)
        if notice.written_bytes != entry.total_bytes:
            return self._reject("wrong_bytes")
        if notice.axis_order not in self._orders:
            return self._reject("unknown_order")
        if entry.state not in WAITING:  # quarantined: the request is over, but its blocks come free
            return self._writer_done(entry, now)
        if now >= entry.deadline_s:
            return self._writer_done(entry, now, "DEADLINE_EXCEEDED", "the completion came too late")
        if not self._content_matches(notice):
            # The mismatch may be a write still in flight, so the writer counts as not having let go.
            self.counters["checksum_mismatch"] += 1
            why = "the KV that arrived is not the KV that was sent"
            return Rejected("checksum_mismatch", (self._abort(entry, "CHECKSUM_MISMATCH", why, now),))
        entry.writer_alive = False
        self._move(entry, states.make_ready)
        return Admit(entry.number, entry.request_id, notice.first_token_id, notice.axis_order)

    def started(self, request_id: str) -> None:
        """The engine scheduled the request for the first time. Unknown requests are ignored."""
        if (entry := self._live_entry(request_id)) and entry.state is HandoffState.READY:
            self._move(entry, states.run)

    def finished(self, request_id: str) -> None:
        """The engine ended the request. Unknown requests are ignored."""
        if entry := self._live_entry(request_id):
            self.started(request_id)
            self._move(entry, states.finish)
            self._forget(entry)

    def abort(self, request_id: str, coordinator_id: str, no_writer: bool, now: float) -> list[Action]:
        """A coordinator aborts its request. Unknown ids and other coordinators' requests are ignored.

        `no_writer`: no ticket was handed out, so the blocks need no quarantine; see `AbortRequest` in the protos.
        """
        entry = self._live_entry(request_id)
        if entry is None or entry.coordinator_id != coordinator_id:
            return []
        entry.writer_alive = entry.writer_alive and not no_writer
        return [self._abort(entry, "CANCELLED", "aborted by its coordinator", now)]

    def coordinator_lost(self, coordinator_id: str, now: float) -> None:
        """A coordinator's output stream broke: its requests end after one lease unless it comes back."""
        end = self._lease_ends.setdefault(coordinator_id, now + self._lease_s)
        self._next_due_s = min(self._next_due_s, end)

    def coordinator_back(self, coordinator_id: str) -> None:
        """A coordinator's output stream is open again."""
        self._lease_ends.pop(coordinator_id, None)

    def writer_lost(self, agent_id: str, now: float) -> None:
        """A writer's process is known to have ended (silence is not enough). Idempotent.

        What it sent before may still arrive and be admitted for `WRITE_GRACE_S`; then `expire` ends the rest.
        Also applies to reservations that are bound to it later.
        """
        if agent_id in self._lost_writers:
            return
        self._lost_writers[agent_id] = now
        while len(self._lost_writers) > _MAX_LOST_WRITERS:
            del self._lost_writers[next(iter(self._lost_writers))]
        for entry in self._open.values():
            if entry.writer_alive and entry.writer_agent_id == agent_id:
                self._lose_writer(entry, now)

    def expire(self, now: float) -> list[Action]:
        """Ends requests, leases and quarantines whose time is up. O(1) when nothing is due."""
        if now < self._next_due_s:
            return []
        ended = {name for name, end in self._lease_ends.items() if end <= now}
        for name in ended:
            del self._lease_ends[name]
        actions: list[Action] = []
        for entry in list(self._open.values()):
            if entry.state in LIVE and entry.coordinator_id in ended:
                message = f"coordinator {entry.coordinator_id} was away for {self._lease_s:g} s"
                actions.append(self._abort(entry, "LEASE_EXPIRED", message, now))
            elif entry.due_s <= now and entry.state in LIVE:
                actions.append(self._overdue(entry, now))
            elif entry.due_s <= now:
                if not entry.writer_lost:
                    actions.append(Silence(entry.number, entry.request_id, entry.writer_agent_id))
                actions += self._writer_done(entry, now).actions
        times = [entry.due_s for entry in self._open.values()] + list(self._lease_ends.values())
        self._next_due_s = min(times, default=float("inf"))
        return actions

    def next_deadline(self) -> float:
        """Latest time of the next `expire` call; may be too early, infinity if nothing is pending."""
        return self._next_due_s

    def state(self, number: int) -> HandoffState | None:
        """State of a reservation; None once it has ended."""
        entry = self._open.get(number)
        return None if entry is None else entry.state

    @property
    def live_requests(self) -> int:
        """Number of requests between `open` and their end."""
        return len(self._live)

    @property
    def awaited_writers(self) -> int:
        """Number of reservations whose writers have not let go; while above 0, poll the transport."""
        return sum(entry.writer_alive for entry in self._open.values())

    @property
    def quarantined_blocks(self) -> int:
        """Number of blocks in quarantine."""
        return sum(e.block_count for e in self._open.values() if e.state is HandoffState.QUARANTINED)

    def _live_entry(self, request_id: str) -> Reservation | None:
        number = self._live.get(request_id)
        return None if number is None else self._open[number]

    def _lose_writer(self, entry: Reservation, lost_s: float) -> None:
        entry.lose_writer(lost_s)
        self._next_due_s = min(self._next_due_s, entry.due_s)

    def _overdue(self, entry: Reservation, now: float) -> Abort:
        if entry.state not in WAITING:
            return self._abort(entry, "DEADLINE_EXCEEDED", "the deadline passed", now)
        if entry.writer_lost and now < entry.deadline_s:
            return self._abort(entry, "TRANSFER_FAILED", "the writer's process ended", now)
        reason = "TICKET_EXPIRED" if now < entry.deadline_s else "DEADLINE_EXCEEDED"
        return self._abort(entry, reason, "no completion in time", now)

    def _abort(self, entry: Reservation, reason: str, message: str, now: float) -> Abort:
        over = entry.writer_lost and entry.writer_end_s <= now
        entry.writer_alive = entry.writer_alive and entry.block_count > 0 and not over
        self._move(entry, states.abort)
        del self._live[entry.request_id]
        if entry.writer_alive:
            self._move(entry, states.quarantine)
            entry.start_quarantine(now + self._quarantine_s)
            self._next_due_s = min(self._next_due_s, entry.due_s)
        else:
            self._free(entry)
        return Abort(entry.number, entry.request_id, reason, message, entry.writer_alive)

    def _writer_done(
        self,
        entry: Reservation,
        now: float,
        reason: str = "TRANSFER_FAILED",
        message: str = "the writer gave up",
    ) -> WriterDone:
        """The writer has let go: frees a quarantined reservation, aborts one that can no longer complete."""
        entry.writer_alive = False
        if entry.state is HandoffState.QUARANTINED:
            self._free(entry)
            return WriterDone(entry.number, (ReleaseWriter(entry.number, entry.request_id),))
        return WriterDone(entry.number, (self._abort(entry, reason, message, now),))

    def _free(self, entry: Reservation) -> None:
        self._move(entry, states.free)
        self._forget(entry)

    def _forget(self, entry: Reservation) -> None:
        del self._open[entry.number]
        if self._live.get(entry.request_id) == entry.number:
            del self._live[entry.request_id]

    def _move(self, entry: Reservation, step: Callable[[HandoffState], HandoffState]) -> None:
        before, entry.state = entry.state, step(entry.state)
        if self._observer:
            self._observer(entry.number, before, entry.state)

    def _reject(self, reason: str) -> Rejected:
        self.counters[reason] += 1
        return Rejected(reason)
