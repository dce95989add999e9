"""What pools give up for others: whose share moves, and who ends a replica before what replaces it is there. Pure.

A pool ends what it has too much of only once what it wants instead serves. Where each of several pools waits for the
place of another's replica, none would ever come to it. Then one of them gives up one replica at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaler.sharing.claims.shares import GPUS, Claim, ClassOfClaim, Rung, Uses, amounts_in, left_of, share

_TINY = 1e-9


WORTH_MOVING = 0.1
"""What others have is taken only if that lowers the loss of all together by this share."""


@dataclass(frozen=True, slots=True)
class Split:
    """Who may have what now."""

    rungs: tuple[int, ...]
    """One a claim."""
    worth_moving: bool = False
    """Whether all together would do much better if some gave up what they have."""
    moved: bool = False
    """Whether some do, and that was so for a while: now also what is the last of its pool."""


def settled_share(
    claims: Sequence[Claim], limits: Uses, held: Sequence[Uses], may_move: bool = True
) -> Split:
    """As `share`, but what a pool has (`held`, one a claim) and wants it keeps, unless `may_move`, and moving it is
    worth that or gives all of them all that they want. A lowest rung that has no room otherwise moves it at once; one
    that never has any moves nothing."""
    best = share(claims, limits)
    kept = [_kept(claim, uses, limits) for claim, uses in zip(claims, held, strict=True)]
    if _excess(claims, kept, limits) > _excess(claims, best, limits) + _TINY:
        return Split(best, worth_moving=True, moved=may_move)
    stay = share(claims, limits, kept)
    if _is_better(claims, best, stay):
        return Split(best if may_move else stay, worth_moving=True, moved=may_move)
    room = _room_beside_last(claims, kept, held, limits)
    if room == limits:
        return Split(stay)
    crowded = _excess(claims, kept, room) > _excess(claims, kept, limits) + _TINY
    is_worth = crowded or _is_better(claims, stay, share(claims, room, kept))
    return Split(stay, worth_moving=is_worth, moved=is_worth and may_move)


def _is_better(claims: Sequence[Claim], after: Sequence[int], before: Sequence[int]) -> bool:
    """Whether it is worth a move, or gives all of them all that they want."""
    all_have_it = _have_all(claims, after) and not _have_all(claims, before)
    return all_have_it or _is_worth(_loss(claims, after), _loss(claims, before))


def _room_beside_last(
    claims: Sequence[Claim], at: Sequence[int], held: Sequence[Uses], limits: Uses
) -> dict[str, float]:
    """The limits without what last replicas take beyond these rungs: they end for nothing less than a move."""
    room = dict(limits)
    for claim, rung, uses in zip(claims, at, held, strict=True):
        here = {name: uses.get(name, 0.0) for name in claim.classes if uses.get(name, 0.0) > _TINY}
        kinds = [claim.classes[name] for name in here]
        if sum(here.values()) > 1 or not all(
            one.usable and one.speed >= claim.rungs[rung].units - _TINY for one in kinds
        ):
            continue
        for name in limits if kinds else ():
            room[name] -= max(0.0, uses.get(name, 0.0) - claim.rungs[rung].uses.get(name, 0.0))
    return room


def _excess(claims: Sequence[Claim], at: Sequence[int], limits: Uses) -> float:
    """By how much these rungs exceed the limits, as shares of them."""
    left = left_of(claims, at, limits)
    return sum(max(0.0, -amount) / max(limits[name], _TINY) for name, amount in left.items())


def _have_all(claims: Sequence[Claim], at: Sequence[int]) -> bool:
    """Whether each has all that it wants."""
    pairs = [(claim.rungs[rung].units, claim.rungs[-1].units) for claim, rung in zip(claims, at, strict=True)]
    return all(units >= most - _TINY for units, most in pairs)


def _kept(claim: Claim, held: Uses, limits: Uses) -> int:
    """The highest rung that takes no more than the pool has, of several the one that it was coming to; the lowest it
    gets in any case."""

    def nearness(rung: Rung) -> float:
        wanted = rung.uses if claim.wanted is None else claim.wanted
        return -sum(abs(rung.uses.get(name, 0.0) - wanted.get(name, 0.0)) for name in limits)

    able = [
        (rung.units, nearness(rung), number)
        for number, rung in enumerate(claim.rungs)
        if all(rung.uses.get(name, 0.0) <= held.get(name, 0.0) + _TINY for name in limits)
    ]
    return max(able)[2] if able else 0


def _loss(claims: Sequence[Claim], at: Sequence[int]) -> tuple[float, float]:
    """Requests a second that miss their target, and that are not served."""
    rungs = [(claim.weight, claim.rungs[rung]) for claim, rung in zip(claims, at, strict=True)]
    missed = sum(weight * (1 - rung.attainment) for weight, rung in rungs)
    return missed, sum(weight * (1 - rung.served) for weight, rung in rungs)


def _is_worth(after: tuple[float, float], before: tuple[float, float]) -> bool:
    for new, old in zip(after, before, strict=True):
        if new < (1 - WORTH_MOVING) * old - _TINY:
            return True
        if new > old + _TINY:
            return False
    return False


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
    ends_soon: bool | None = None
    """See `Claim`."""

    def lacks(self, name: str) -> bool:
        """Whether it is to have more replicas of a class, or more of an amount."""
        return self.wanted.get(name, 0.0) > self.held.get(name, 0.0) + _TINY

    def has_too_much(self, name: str) -> bool:
        """Of a class, or of an amount."""
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
        if self.ends_soon is not None:
            return self.ends_soon
        return any(
            self.has_too_much(name) and self.carried - one.speed >= self.units - _TINY
            for name, one in self.classes.items()
        )

    @property
    def is_last(self) -> bool:
        """Whether it has one replica, which carries all and can meet the target: nobody would serve without it."""
        usable = all(one.usable for name, one in self.classes.items() if self.held.get(name, 0.0))
        return self.replicas <= 1 and usable and self.carried >= self.units - _TINY

    def has_detour(self, given: str, left: Uses) -> bool:
        """Whether there is room for others that carry all in place of a class."""
        for name, one in self.classes.items():
            count = math.ceil(self.units / one.speed - _TINY)
            takes = {name: 1.0, **{amount: one.takes(amount) for amount in amounts_in(left)}}
            has_room = all(count * each <= left.get(of, math.inf) + _TINY for of, each in takes.items())
            if name != given and one.usable and has_room:
                return True
        return False

    def turn(self, given: str, left: Uses) -> tuple[int, float, float]:
        """Who gives a class first: who has others, then who need not be without, then who has too few anyway; of these
        the one with most replicas, then the one with least traffic."""
        if self.replicas > 1:
            rank = 0
        elif self.is_last:
            rank = 1 if self.has_detour(given, left) else 3
        else:
            rank = 2
        return rank, -self.replicas, self.weight


@dataclass(frozen=True, slots=True)
class Given:
    """What a pool gives up."""

    name: str
    """Its class, as in `Uses`."""
    is_last: bool
    """See `PoolStanding`."""


def standing(claim: Claim, live: Uses, granted: Uses, units: float) -> PoolStanding:
    """Of a pool that has all this, what drains left out. `granted` is what it is to have where that is not decided."""
    wanted = granted if claim.wanted is None else claim.wanted
    held = {
        name: max(min(amount, wanted.get(name, 0.0)), amount - claim.standbys.get(name, 0.0))
        for name, amount in live.items()
    }
    return PoolStanding(held, wanted, units, claim.classes, claim.weight, claim.ends_soon)


def gives_way(
    pools: Sequence[PoolStanding], limits: Uses, held: Uses, last_too: bool = False
) -> dict[int, Given]:
    """The pools, by their place in `pools`, that end a replica at once, and of which class; one of those that wait for
    each other. `held`: all that there is of each limit, without what drains. `last_too`: where nothing else helps also
    a last replica that does its work."""
    left = {name: limit - held.get(name, 0.0) for name, limit in limits.items()}
    short = [_short_of(one, left) for one in pools]
    waits = [_waits_for(number, short, pools) for number in range(len(pools))]
    reached = [_reached(number, waits) for number in range(len(pools))]
    given: dict[int, Given] = {}
    seen: set[frozenset[int]] = set()
    for number, group in enumerate(reached):
        circle = group | {number}
        is_stuck = all(waits[one] and number in reached[one] | {one} for one in circle)
        if is_stuck and circle not in seen:
            seen.add(circle)
            able = [
                (one, name)
                for one in circle
                if last_too or not pools[one].is_last
                for name in _asked_of(one, short, pools)
            ]
            if able:
                one, name = min(able, key=lambda it: (*pools[it[0]].turn(it[1], left), *it))
                given[one] = Given(name, pools[one].is_last)
    return given


def _short_of(one: PoolStanding, left: Mapping[str, float]) -> frozenset[str]:
    """The limits for which it waits; none where it can start something that it lacks, or ends something soon."""
    if not one.classes:  # its replicas are alike, and only GPUs limit them
        lacking = one.wanted.get(GPUS, 0.0) - one.held.get(GPUS, 0.0)
        return frozenset({GPUS} if lacking > max(0.0, left.get(GPUS, lacking)) + _TINY else ())
    lacked = {name: kind for name, kind in one.classes.items() if one.lacks(name)}
    short: set[str] = set()
    for name, kind in lacked.items():
        wall = {name} if left.get(name, 1.0) < 1.0 - _TINY else set()
        wall |= {amount for amount in amounts_in(left) if kind.takes(amount) > left[amount] + _TINY}
        if not wall:
            return frozenset()
        short |= wall
    return frozenset() if one.ends_one_soon else frozenset(short)


def _waits_for(number: int, short: Sequence[frozenset[str]], pools: Sequence[PoolStanding]) -> frozenset[int]:
    """The pools that have too much of what this one is short of. Of amounts it may be itself."""
    return frozenset(
        other
        for other, one in enumerate(pools)
        for name in short[number]
        if one.has_too_much(name) and (other != number or amounts_in((name,)))
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
    """Classes of which it may give up one, for which another waits, or for the money or GPUs of which."""
    one = pools[number]
    asked = frozenset().union(*(names for other, names in enumerate(short) if other != number))
    amounts = [amount for amount in amounts_in(asked) if one.has_too_much(amount)]
    return [
        name
        for name, kind in sorted(one.classes.items())
        if one.has_too_much(name) and (name in asked or any(kind.takes(amount) for amount in amounts))
    ]
