"""The decode worker's reservations: which requests may use reserved blocks, which writers may write to them.

Pure: time is an argument in seconds, and each method returns the actions that its caller applies to the
engine and the transport. Poll the transport and pass its notifications on before calling `expire`.

A reservation passes these states, none of them twice:

    RESERVED -> RECEIVING -> READY -> RUNNING -> FINISHED
       |            |          |         |
       +------------+----------+---------+--> ABORTED [-> QUARANTINED] -> FREED

Writes are one-sided, so the owner of the blocks does not see them arrive: RECEIVING only means that the writer is
known, and RESERVED -> READY is legal.

Protection from late writes: a block leaves quarantine only when its writer has let go (completion or
drained), when the writer's process ended at least `WRITE_GRACE_S` ago (`writer_lost`), or when it can no
longer write. A writer posts nothing after its ticket's deadline and disconnects `WRITE_GRACE_S` later
(`KvPusher`); the quarantine lasts twice the grace beyond the deadline, to cover the ticket's travel time.
docs/internals/design-notes/quarantine.md has the full argument and its one remaining gap.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kv_transfer.handoff.messages import WRITE_GRACE_S, BadNotification, Drained, WriteCompletion, decode
from splitserve.errors import BrokenInvariantError, InvalidArgumentError

REJECTION_REASONS = (
    "malformed",
    "stale_epoch",
    "unknown_reservation",
    "wrong_bytes",
    "duplicate",
    "not_live",
    "foreign_writer",
    "checksum_mismatch",
)


class HandoffState(enum.Enum):
    """State of a reservation."""

    RESERVED = "reserved"
    """Blocks are reserved; their ticket may be in transit."""
    RECEIVING = "receiving"
    """The writer is known."""
    READY = "ready"
    """The completion was admitted: all bytes have arrived and the writer has let go."""
    RUNNING = "running"
    """The engine decodes from the blocks."""
    FINISHED = "finished"
    """The engine ended the request. Final."""
    ABORTED = "aborted"
    """The request was given up."""
    QUARANTINED = "quarantined"
    """As ABORTED, but the writer may still write to the blocks."""
    FREED = "freed"
    """The blocks are free. Final."""


WAITING = frozenset({HandoffState.RESERVED, HandoffState.RECEIVING})
LIVE = WAITING | {HandoffState.READY, HandoffState.RUNNING}


class IllegalTransitionError(BrokenInvariantError):
    """A transition that does not exist: a bug in the caller; no peer can cause it."""


_BEFORE: Mapping[HandoffState, frozenset[HandoffState]] = MappingProxyType(
    {
        HandoffState.RECEIVING: frozenset({HandoffState.RESERVED}),
        HandoffState.READY: WAITING,
        HandoffState.RUNNING: frozenset({HandoffState.READY}),
        HandoffState.FINISHED: frozenset({HandoffState.RUNNING}),
        HandoffState.ABORTED: LIVE,
        HandoffState.QUARANTINED: frozenset({HandoffState.ABORTED}),
        HandoffState.FREED: frozenset({HandoffState.ABORTED, HandoffState.QUARANTINED}),
    }
)
"""The states from which each state may be entered."""


@dataclass(slots=True)
class Reservation:
    """An entry of `ReservationTable`, modified only by it. Times in seconds on the caller's clock."""

    number: int
    request_id: str
    coordinator_id: str
    block_count: int
    total_bytes: int
    deadline_s: float
    writer_end_s: float
    """From this time on no write of the writer can arrive."""
    state: HandoffState = HandoffState.RESERVED
    writer_alive: bool = True
    """Whether the writer may still write: it has neither completed nor given up."""
    writer_agent_id: str | None = None
    writer_lost: bool = False
    """Whether the writer's process has ended."""
    quarantine_end_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When the current state times out."""
        if self.state is HandoffState.QUARANTINED:
            return self.quarantine_end_s
        if self.state in WAITING:  # a completion may arrive a little after the ticket's deadline
            return min(self.deadline_s, self.writer_end_s)
        return self.deadline_s

    def become(self, state: HandoffState) -> None:
        """Enters a state. Raises IllegalTransitionError."""
        if self.state not in _BEFORE.get(state, frozenset()):
            raise IllegalTransitionError(f"a handoff cannot go from {self.state.value} to {state.value}")
        self.state = state

    def lose_writer(self, lost_s: float) -> None:
        """The writer's process ended at `lost_s`: writes posted before may still arrive for `WRITE_GRACE_S`."""
        self.writer_lost = True
        self.writer_end_s = min(self.writer_end_s, lost_s + WRITE_GRACE_S)
        if self.state is HandoffState.QUARANTINED:
            self.quarantine_end_s = min(self.quarantine_end_s, self.writer_end_s)

    def start_quarantine(self, min_end_s: float) -> None:
        """Quarantines until the writer's end; until `min_end_s` at least unless its process has ended."""
        self.quarantine_end_s = self.writer_end_s if self.writer_lost else max(min_end_s, self.writer_end_s)


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request in the engine. Quarantine its blocks if `writer_alive`, else free them."""

    number: int
    request_id: str
    reason: str
    message: str
    writer_alive: bool


@dataclass(frozen=True, slots=True)
class ReleaseWriter:
    """Free the quarantined blocks of an aborted request."""

    number: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Silence:
    """The writer never let go, which is to be logged as a warning; `agent_id` is None if the writer was never known.

    The agent is not refused for it: later messages for this reservation are dropped anyway, and its other handoffs go
    on. Nor do this worker's writes to the agent end, which have nothing to do with what the agent writes here.
    """

    number: int
    request_id: str
    agent_id: str | None


Action = Abort | ReleaseWriter | Silence


@dataclass(frozen=True, slots=True)
class Admit:
    """All bytes have arrived and the writer has let go: start decoding from `first_token`."""

    number: int
    request_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class WriterDone:
    """The writer has let go and no request can start from it: apply `actions`."""

    number: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused and counted under `reason`, one of REJECTION_REASONS. Apply `actions`, if any."""

    reason: str
    actions: tuple[Action, ...] = ()


Verdict = Admit | WriterDone | Rejected


_MAX_LOST_WRITERS = 4096


class ReservationTable:
    """All reservations of one boot of a decode worker.

    `content_matches` verifies checksums; it is called once, for a completion that passed all other checks.
    """

    def __init__(
        self,
        epoch: int,
        *,
        quarantine_s: float,
        content_matches: Callable[[WriteCompletion], bool] = lambda _: True,
    ) -> None:
        if epoch == 0:
            raise InvalidArgumentError("epoch must not be 0", field="epoch")
        self.epoch = epoch
        self.counters: Counter[str] = Counter(dict.fromkeys(REJECTION_REASONS, 0))
        self._quarantine_s = quarantine_s
        self._content_matches = content_matches
        self._last_number = 0
        self._open: dict[int, Reservation] = {}
        self._live: dict[str, int] = {}
        self._lost_writers: dict[str, float] = {}
        self._next_due_s = float("inf")
        """When `expire` has something to do at the earliest; may be too early."""

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
            entry.become(HandoffState.RECEIVING)
        if (lost_s := self._lost_writers.get(agent_id)) is not None:
            self._lose_writer(entry, lost_s)

    def on_notification(self, agent_id: str, message: bytes, now: float) -> Verdict:
        """Checks a peer's notification, from the cheapest check to the costliest, and applies it.

        A completion that arrives after the request's deadline is not admitted.
        """
        notice = decode(message)
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
        entry.become(HandoffState.READY)
        return Admit(entry.number, entry.request_id, notice.first_token_id)

    def started(self, request_id: str) -> None:
        """The engine scheduled the request for the first time. Unknown requests are ignored."""
        if (entry := self._live_entry(request_id)) and entry.state is HandoffState.READY:
            entry.become(HandoffState.RUNNING)

    def finished(self, request_id: str) -> None:
        """The engine ended the request. Unknown requests are ignored."""
        if entry := self._live_entry(request_id):
            self.started(request_id)
            entry.become(HandoffState.FINISHED)
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
        """Ends requests and quarantines whose time is up. O(1) when nothing is due."""
        if now < self._next_due_s:
            return []
        actions: list[Action] = []
        for entry in [entry for entry in self._open.values() if entry.due_s <= now]:
            if entry.state in LIVE:
                actions.append(self._overdue(entry, now))
            else:
                if not entry.writer_lost:
                    actions.append(Silence(entry.number, entry.request_id, entry.writer_agent_id))
                actions += self._writer_done(entry, now).actions
        self._next_due_s = min((entry.due_s for entry in self._open.values()), default=float("inf"))
        return actions

    @property
    def awaited_writers(self) -> int:
        """Number of reservations whose writers have not let go; while above 0, poll the transport."""
        return sum(entry.writer_alive for entry in self._open.values())

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
        entry.become(HandoffState.ABORTED)
        del self._live[entry.request_id]
        if entry.writer_alive:
            entry.become(HandoffState.QUARANTINED)
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
        entry.become(HandoffState.FREED)
        self._forget(entry)

    def _forget(self, entry: Reservation) -> None:
        del self._open[entry.number]
        if self._live.get(entry.request_id) == entry.number:
            del self._live[entry.request_id]

    def _reject(self, reason: str) -> Rejected:
        self.counters[reason] += 1
        return Rejected(reason)
