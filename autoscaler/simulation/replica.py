"""What replicas of both pools have in common: identity, life, and the virtual clock's agenda."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from autoscaler.snapshot import ReplicaState

Happening = Callable[[float], None]
"""Something that happens at a time, which it is told."""


class Agenda:
    """The events to come, in order of time; of equals the one set first comes first."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Happening]] = []
        self._number = 0

    def at(self, when_s: float, happening: Happening) -> None:
        """Sets an event."""
        self._number += 1
        heappush(self._events, (when_s, self._number, happening))

    @property
    def next_s(self) -> float:
        """When the next event is; infinity when there is none."""
        return self._events[0][0] if self._events else float("inf")

    def pop(self) -> tuple[float, Happening]:
        """Takes the next event."""
        when_s, _, happening = heappop(self._events)
        return when_s, happening


class SimulatedReplica:
    """A replica from the order to start it until it ended."""

    def __init__(self, name: str, ordered_s: float) -> None:
        self.name = name
        self.state = ReplicaState.STARTING
        self.since_s = ordered_s
        self.ordered_s = ordered_s
        self.ended_s: float | None = None
        self.assigned = 0
        """Requests that it has or will get."""

    @property
    def load(self) -> int:
        """Requests that run or wait here: the least loaded is drained first."""
        return self.assigned

    def enter(self, state: ReplicaState, now_s: float) -> None:
        """Changes its state."""
        self.state, self.since_s = state, now_s
