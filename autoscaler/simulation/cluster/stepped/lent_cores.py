"""Cores that replicas of one simulated host lend each other while they rest, for chunks of prompts (decision 34) and
decode steps (decision 65).

Who rests, and until when, the engine's own `StepLending` decides; here is what its neighbours make of it. Cores come
and go at once: what an operation of the kernels lasts, some milliseconds, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autoscaler.simulation.cluster.replica import EventQueue

Borrows = Literal["wanted", "idle"]
"""Cores that a step can use: of all neighbours, who may rest for its sake, or of those that rest anyway."""


class LentCores:
    """The cores of one host. Each replica has a `CoreSlot`."""

    def __init__(self, events: EventQueue, lent_time: float) -> None:
        """`lent_time`: see `EngineModel.lent_time`."""
        self.events = events
        self._serial = 2 * lent_time - 1
        self._slots: list[CoreSlot] = []

    def slot(self, is_up: Callable[[], bool]) -> CoreSlot:
        """A place for a replica, which lends while `is_up`."""
        self._slots.append(CoreSlot(self, is_up))
        return self._slots[-1]

    def borrow(self, borrower: CoreSlot, wanted: bool) -> list[CoreSlot]:
        """All others that are up and that nobody else has borrowed; unless they are `wanted`, only those that rest."""
        lent = [
            each
            for each in self._slots
            if each is not borrower and each.borrower is None and each.is_up() and (wanted or each.rests)
        ]
        for each in lent:
            each.borrower, each.wanted = borrower, wanted
        return lent

    def time_of(self, lenders: int) -> float:
        """What a chunk takes, of its time alone, while so many others rest: a part of it does not get shorter (Amdahl),
        as large as the time with one tells."""
        return self._serial + (1 - self._serial) / (1 + lenders)


class CoreSlot:
    """One replica's cores, and the step that it computes."""

    def __init__(self, cores: LentCores, is_up: Callable[[], bool]) -> None:
        self._cores = cores
        self.is_up = is_up
        self.borrower: CoreSlot | None = None
        self.wanted = False
        """Whether the borrower would have the owner rest."""
        self.rests = True
        self.uses = 0
        """Changes while others compute here."""
        self._lent: list[CoreSlot] = []
        self._left_s = self._whole_s = self._helped_s = 0.0
        """Of the present step, in seconds of its time alone: what is left, all, and that of each lender's part."""
        self._since_s = 0.0
        """When `_left_s` was true."""
        self._lenders = 0
        self._number = 0
        self._ended: Callable[[float], None] = lambda now_s: None

    @property
    def speedup(self) -> float:
        """See `ModelRunner.speedup`."""
        return 1 + self._helped_s / self._whole_s if self._whole_s > 0 else 1.0

    def demand(self) -> int | None:
        """See `ModelRunner.demand`."""
        if self.borrower is None or not self.wanted:
            return None
        self.uses += self.rests
        return self.uses

    def rest(self, now_s: float) -> None:
        """The replica has nothing to do until its next step."""
        self.rests = True
        if self.borrower is not None:
            self.borrower.look(now_s)

    def compute(self, now_s: float, alone_s: float, borrows: Borrows, ended: Callable[[float], None]) -> None:
        """Begins a step that takes `alone_s` seconds alone; calls `ended` with the time. `borrows`: whose cores it can
        use."""
        self.rests = False
        if self.borrower is not None:
            self.borrower.look(now_s)
        self._lent = self._cores.borrow(self, borrows == "wanted")
        self._left_s = self._whole_s = alone_s
        self._helped_s, self._since_s, self._ended = 0.0, now_s, ended
        self._plan(now_s)

    def look(self, now_s: float) -> None:
        """Somebody who lends has begun or ended a rest."""
        passed_s = (now_s - self._since_s) / self._cores.time_of(self._lenders)
        self._left_s, self._since_s = max(0.0, self._left_s - passed_s), now_s
        self._helped_s += passed_s * self._lenders
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        self._lenders = sum(each.rests for each in self._lent)
        self._number += 1
        number = self._number

        def end(at_s: float) -> None:
            if number == self._number:
                self._end(at_s)

        self._cores.events.at(now_s + self._left_s * self._cores.time_of(self._lenders), end)

    def _end(self, now_s: float) -> None:
        self._helped_s += self._left_s * self._lenders
        self._number += 1
        for each in self._lent:
            each.borrower = None
        self._lent = []
        self._ended(now_s)
