"""Which boots of workers have ended for certain, by what the actuator lists and the coordinators saw. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MAX_ENDED = 256
"""Boots told again at each look; coordinators keep as many."""


class EndedReplicas:
    """For an actuator whose list is complete: what was on it and is on it no more has ended.

    Workers that were never on the list belong to somebody else and are never named. A replica that runs again under its
    name stays on the list; that its older boot has ended is for the coordinators to find out.
    """

    def __init__(self) -> None:
        self._boots: dict[str, set[int]] = {}
        """Epochs seen, by the name of a replica that is on the list."""
        self._ended: dict[tuple[str, int], None] = {}

    def look(self, listed: Iterable[str], boots: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """The boots, (worker id, epoch), that have ended, the latest MAX_ENDED.

        `boots` are those that coordinators reported before the replicas were listed.
        """
        names = set(listed)
        for name in names - self._boots.keys():
            self._boots[name] = set()
        for name, epoch in boots:
            if name in self._boots:
                self._boots[name].add(epoch)
        for name in self._boots.keys() - names:
            self._ended |= dict.fromkeys((name, epoch) for epoch in sorted(self._boots.pop(name)))
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return tuple(self._ended)
