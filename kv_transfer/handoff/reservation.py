"""State machine of one reservation.

    RESERVED -> RECEIVING -> READY -> RUNNING -> FINISHED
       |            |          |         |
       +------------+----------+---------+--> ABORTED [-> QUARANTINED] -> FREED

No state is entered twice. Writes are one-sided, so the owner of the blocks does not see them arrive:
RECEIVING only means that the writer is known, and RESERVED -> READY is legal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kv_transfer.handoff.ticket import WRITE_GRACE_S
from splitserve.errors import BrokenInvariantError


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


def _transition(state: HandoffState, to: HandoffState, legal: frozenset[HandoffState]) -> HandoffState:
    if state not in legal:
        raise IllegalTransitionError(f"a handoff cannot go from {state.value} to {to.value}")
    return to


def receive(state: HandoffState) -> HandoffState:
    """The writer is known."""
    return _transition(state, HandoffState.RECEIVING, frozenset({HandoffState.RESERVED}))


def make_ready(state: HandoffState) -> HandoffState:
    """The completion is admitted."""
    return _transition(state, HandoffState.READY, WAITING)


def run(state: HandoffState) -> HandoffState:
    """The engine schedules the sequence."""
    return _transition(state, HandoffState.RUNNING, frozenset({HandoffState.READY}))


def finish(state: HandoffState) -> HandoffState:
    """The engine ended the sequence."""
    return _transition(state, HandoffState.FINISHED, frozenset({HandoffState.RUNNING}))


def abort(state: HandoffState) -> HandoffState:
    """The request is given up."""
    return _transition(state, HandoffState.ABORTED, LIVE)


def quarantine(state: HandoffState) -> HandoffState:
    """The blocks of an aborted request wait for their writer."""
    return _transition(state, HandoffState.QUARANTINED, frozenset({HandoffState.ABORTED}))


def free(state: HandoffState) -> HandoffState:
    """Neither request nor writer uses the aborted request's blocks any more."""
    return _transition(state, HandoffState.FREED, frozenset({HandoffState.ABORTED, HandoffState.QUARANTINED}))


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
    """From then on no write of the writer can arrive."""
    state: HandoffState = HandoffState.RESERVED
    writer_alive: bool = True
    """The writer has not let go: it may still write."""
    writer_agent_id: str | None = None
    writer_lost: bool = False
    """The writer's process has ended."""
    quarantine_end_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When the current state times out."""
        if self.state is HandoffState.QUARANTINED:
            return self.quarantine_end_s
        if self.state in WAITING:  # a completion may arrive a little after the ticket's deadline
            return min(self.deadline_s, self.writer_end_s)
        return self.deadline_s

    def lose_writer(self, lost_s: float) -> None:
        """The writer's process ended at `lost_s`: writes posted before may still arrive for `WRITE_GRACE_S`."""
        self.writer_lost = True
        self.writer_end_s = min(self.writer_end_s, lost_s + WRITE_GRACE_S)
        if self.state is HandoffState.QUARANTINED:
            self.quarantine_end_s = min(self.quarantine_end_s, self.writer_end_s)

    def start_quarantine(self, min_end_s: float) -> None:
        """Quarantines until the writer's end; until `min_end_s` at least unless its process has ended."""
        self.quarantine_end_s = self.writer_end_s if self.writer_lost else max(min_end_s, self.writer_end_s)
