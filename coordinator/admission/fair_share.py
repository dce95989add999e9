"""Fair shares by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

The party with the least service relative to its weight is next. Service is charged as it is given: prompts when they
start, output tokens as they are sent. The counter of a party that returns from idling is lifted to the least counter of
those that wait, so that idling earns no credit. While two parties are both backlogged, their service over weight never
differs by more than 2 max(prompt cost of the longest prompt, output cost of all that can run at once) / weight (theorem
4.4). Shares are work-conserving: what one party does not use goes to the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False, slots=True)
class FairShareCounter:
    """One party's counter."""

    weight: float
    served: float = 0.0
    """Service so far, over the weight; lifted after idling."""
    waiting: int = 0
    """Requests in the queue."""

    def charge(self, cost: float) -> None:
        """Charges service of this cost."""
        self.served += cost / self.weight


class FairShare(Generic[K]):
    """The counters of all parties ever seen; there are as many as names."""

    def __init__(self) -> None:
        self._counters: dict[K, FairShareCounter] = {}
        self._waiting: dict[K, FairShareCounter] = {}
        self._last_left: FairShareCounter | None = None

    def counter(self, key: K, weight: float) -> FairShareCounter:
        """The counter of that name; its weight is the latest given."""
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = FairShareCounter(weight)
        counter.weight = weight
        return counter

    def join(self, key: K, counter: FairShareCounter) -> None:
        """Adds a waiting request of this party. The first one lifts the party's counter."""
        counter.waiting += 1
        if counter.waiting > 1:
            return
        if self._waiting:
            counter.served = max(counter.served, min(other.served for other in self._waiting.values()))
        elif self._last_left is not None:
            counter.served = max(counter.served, self._last_left.served)
        self._waiting[key] = counter

    def skip(self, counter: FairShareCounter) -> None:
        """A request of this party is admitted without waiting: equivalent to joining and leaving at once."""
        if self._last_left is not None and self._last_left is not counter:
            counter.served = max(counter.served, self._last_left.served)
        self._last_left = counter

    def leave(self, key: K, counter: FairShareCounter) -> None:
        """Removes a waiting request of this party."""
        counter.waiting -= 1
        if not counter.waiting:
            del self._waiting[key]
            self._last_left = counter

    @property
    def waiting(self) -> dict[K, FairShareCounter]:
        """Parties with requests in the queue."""
        return self._waiting
