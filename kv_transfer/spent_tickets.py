"""Which tickets were used, so that none is used twice: the second write would hit the blocks' next owner.

The wire carries a ticket's time left and not its end, so a message that is sent again looks fresh. Hence
a used ticket is remembered for longer than it lives, and after that its number is a floor: reservations of
one boot are numbered in order, so whatever is not above the floor is old.
"""

from __future__ import annotations

import heapq

REMEMBER_S = 60.0
"""How long after its deadline a ticket is remembered by itself; a ticket that travels longer is refused."""
MAX_OWNERS = 4096


class SpentTickets:
    """The used tickets of each decode agent. Memory grows with the tickets of `REMEMBER_S` and their lives."""

    def __init__(self) -> None:
        self._spent: dict[str, set[int]] = {}
        self._floors: dict[str, int] = {}
        self._ends: list[tuple[float, str, int]] = []

    def spend(self, agent_id: str, reservation: int, deadline_s: float, now: float) -> bool:
        """Marks a ticket as used; False, and nothing changed, when it was used before."""
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
            # Taken out and put in again, so that the agent heard of longest ago comes first.
            self._floors[agent_id] = max(reservation, self._floors.pop(agent_id, 0))
        while len(self._floors) > MAX_OWNERS:
            del self._floors[next(iter(self._floors))]
