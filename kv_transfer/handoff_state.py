"""The states of one reservation, and the only steps between them.

    RESERVED -> RECEIVING -> READY -> RUNNING -> FINISHED
       |            |          |         |
       +------------+----------+---------+--> ABORTED [-> QUARANTINED] -> FREED

A state never comes back. Writes are one-sided, so the owner of the blocks does not see them arrive:
RECEIVING only means that a writer has made itself known, and RESERVED -> READY is legal.
"""

from __future__ import annotations

import enum


class HandoffState(enum.Enum):
    """Where a reservation stands."""

    RESERVED = "reserved"
    """Blocks are set aside; a ticket for them may be anywhere."""
    RECEIVING = "receiving"
    """The writer is known."""
    READY = "ready"
    """The completion was admitted: every byte is here, the writer has let go."""
    RUNNING = "running"
    """The engine decodes from the blocks."""
    FINISHED = "finished"
    """The request ended by itself. Final."""
    ABORTED = "aborted"
    """The request has let go of the blocks."""
    QUARANTINED = "quarantined"
    """As ABORTED, but the writer has not let go."""
    FREED = "freed"
    """Nobody holds the blocks. Final."""


WAITING = frozenset({HandoffState.RESERVED, HandoffState.RECEIVING})
LIVE = WAITING | {HandoffState.READY, HandoffState.RUNNING}


class IllegalTransitionError(Exception):
    """A step that the state machine does not have: a bug of the caller, never a peer's fault."""


def _step(state: HandoffState, to: HandoffState, legal: frozenset[HandoffState]) -> HandoffState:
    if state not in legal:
        raise IllegalTransitionError(f"a handoff cannot go from {state.value} to {to.value}")
    return to


def receive(state: HandoffState) -> HandoffState:
    """The writer makes itself known."""
    return _step(state, HandoffState.RECEIVING, frozenset({HandoffState.RESERVED}))


def make_ready(state: HandoffState) -> HandoffState:
    """The completion is admitted."""
    return _step(state, HandoffState.READY, WAITING)


def run(state: HandoffState) -> HandoffState:
    """The engine takes the sequence into a step."""
    return _step(state, HandoffState.RUNNING, frozenset({HandoffState.READY}))


def finish(state: HandoffState) -> HandoffState:
    """The sequence ends by itself."""
    return _step(state, HandoffState.FINISHED, frozenset({HandoffState.RUNNING}))


def abort(state: HandoffState) -> HandoffState:
    """The request is given up."""
    return _step(state, HandoffState.ABORTED, LIVE)


def quarantine(state: HandoffState) -> HandoffState:
    """The blocks of an aborted request wait for their writer."""
    return _step(state, HandoffState.QUARANTINED, frozenset({HandoffState.ABORTED}))


def free(state: HandoffState) -> HandoffState:
    """Both owners have let go of an aborted request's blocks."""
    return _step(state, HandoffState.FREED, frozenset({HandoffState.ABORTED, HandoffState.QUARANTINED}))
