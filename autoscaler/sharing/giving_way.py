"""Which pool ends a replica before what replaces it is there, because pools wait for what the others have. Pure.

A pool ends what it has too much of only once what it wants instead serves. Where each of several pools waits for the
place of another's replica, none would ever come to it. Then one of them gives up one replica at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaler.sharing.shares import MONEY, Claim, ClassOfClaim, Uses

_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class PoolStanding:
    """What one pool has, and what it is to have."""

    held: Uses
    """In rotation, or coming to it: without what drains, and without the standbys that it is to have."""
    wanted: Uses
    units: float
    """What is to be carried, also while replicas change."""
    classes: Mapping[str, ClassOfClaim]
    """See `Claim`."""
    weight: float = 1.0

    def lacks(self, name: str) -> bool:
        """Whether it is to have more replicas of a class, or more money."""
        return self.wanted.get(name, 0.0) > self.held.get(name, 0.0) + _TINY

    def has_too_much(self, name: str) -> bool:
        """Of a class, or of money."""
        return self.held.get(name, 0.0) > self.wanted.get(name, 0.0) + _TINY

    @property
    def replicas(self) -> float:
        """All that it has."""
        return sum(self.held.get(name, 0.0) for name in self.classes)

    @property
    def carried(self) -> float:
        """Units of all that it has."""
        return sum(self.held.get(name, 0.0) * one.speed for name, one in self.classes.items())

    @property
    def ends_one_soon(self) -> bool:
        """Whether the others carry without it what is to be carried, once all serve."""
        return any(
            self.has_too_much(name) and self.carried - one.speed >= self.units - _TINY
            for name, one in self.classes.items()
        )

    def may_end(self, name: str) -> bool:
        """The last replica that carries all, and can meet the target, does not end: nobody would serve meanwhile."""
        carries = self.classes[name].usable and self.carried >= self.units - _TINY
        return self.has_too_much(name) and (self.replicas > 1 or not carries)


def standing(claim: Claim, live: Uses, granted: Uses, units: float) -> PoolStanding:
    """Of a pool that has all this, what drains left out. `granted` is what it is to have where that is not decided."""
    wanted = granted if claim.wanted is None else claim.wanted
    held = {
        name: max(min(amount, wanted.get(name, 0.0)), amount - claim.standbys.get(name, 0.0))
        for name, amount in live.items()
    }
    return PoolStanding(held, wanted, units, claim.classes, claim.weight)


def gives_way(pools: Sequence[PoolStanding], limits: Uses, held: Uses) -> dict[int, str]:
    """The pools, by their place in `pools`, that end a replica at once, and of which class; one of those that wait for
    each other. `held`: all that there is of each limit, without what drains."""
    left = {name: limit - held.get(name, 0.0) for name, limit in limits.items()}
    short = [_short_of(one, left) for one in pools]
    waits = [_waits_for(number, short, pools) for number in range(len(pools))]
    reached = [_reached(number, waits) for number in range(len(pools))]
    given: dict[int, str] = {}
    seen: set[frozenset[int]] = set()
    for number, group in enumerate(reached):
        circle = group | {number}
        is_stuck = all(waits[one] and number in reached[one] | {one} for one in circle)
        if is_stuck and circle not in seen:
            seen.add(circle)
            able = [(one, name) for one in circle for name in _asked_of(one, short, pools)]
            if able:
                one, name = min(able, key=lambda it: (-pools[it[0]].replicas, pools[it[0]].weight, *it))
                given[one] = name
    return given


def _short_of(one: PoolStanding, left: Mapping[str, float]) -> frozenset[str]:
    """The limits for which it waits; none where it can start something that it lacks, or ends something soon."""
    lacked = {name: kind for name, kind in one.classes.items() if one.lacks(name)}
    short: set[str] = set()
    for name, kind in lacked.items():
        wall = {name} if left.get(name, 1.0) < 1.0 - _TINY else set()
        if kind.price_per_hour > left.get(MONEY, kind.price_per_hour) + _TINY:
            wall.add(MONEY)
        if not wall:
            return frozenset()
        short |= wall
    return frozenset() if one.ends_one_soon else frozenset(short)


def _waits_for(number: int, short: Sequence[frozenset[str]], pools: Sequence[PoolStanding]) -> frozenset[int]:
    """The pools that have too much of what this one is short of. Of money it may be itself."""
    return frozenset(
        other
        for other, one in enumerate(pools)
        for name in short[number]
        if one.has_too_much(name) and (other != number or name == MONEY)
    )


def _reached(number: int, waits: Sequence[frozenset[int]]) -> frozenset[int]:
    """All pools that it waits for, and that those wait for."""
    found: set[int] = set()
    ahead = list(waits[number])
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += waits[one]
    return frozenset(found)


def _asked_of(number: int, short: Sequence[frozenset[str]], pools: Sequence[PoolStanding]) -> list[str]:
    """Classes of which it may give up one, for which another waits."""
    asked = frozenset().union(*(names for other, names in enumerate(short) if other != number))
    return [name for name in sorted(asked & pools[number].classes.keys()) if pools[number].may_end(name)]
