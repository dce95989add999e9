"""What is limited (money, GPUs, replicas of a class), shared by several pools, of one model or of several. Pure.

Each pool has a ladder: what it takes to have ever more of what it wants, and which share of its requests would then
meet the target. From the lowest rungs on, the next step goes where it saves most predicted attainment for what it
takes of the scarcest thing, as a share of all there is of it. A step may climb several rungs at once: one replica more
of an overloaded pool may save nothing, and the third one all. Where no step saves any attainment, the share of the
demand that is served counts, then what was wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from splitserve.gpus.kinds import is_of_kind

_TINY = 1e-9
MOST_EXCHANGES = 500
"""Tried at a time: more models and classes would take a decision too long."""

Uses = Mapping[str, float]
"""Amounts by what is limited: `MONEY` an hour, `GPUS`, GPUs of a kind, replicas of a class."""
MONEY, GPUS = "money", "gpus"
_CLASS, _KIND = "class ", "gpus of "


def of_class(name: str) -> str:
    """What stands for the replicas of a class in `Uses`."""
    return _CLASS + name


def of_kind(kind: str) -> str:
    """What stands for the GPUs of a kind in `Uses`."""
    return _KIND + kind


def kinds_in(limits: Iterable[str]) -> list[str]:
    """What stands for kinds of GPUs among these."""
    return [name for name in limits if name.startswith(_KIND)]


def counted_in(gpu: str, names: Iterable[str]) -> tuple[str, ...]:
    """The kinds among `names` that the GPUs of a class are of, which the class calls `gpu`; those of a class that says
    nothing are of none."""
    return tuple(name for name in kinds_in(names) if is_of_kind(name.removeprefix(_KIND), gpu))


def amounts_in(limits: Iterable[str]) -> list[str]:
    """What each replica takes some of, by its class; the others are places."""
    return [name for name in limits if not name.startswith(_CLASS)]


def limit_text(name: str, limit: float) -> str:
    """A limit, for people."""
    if name == MONEY:
        return f"a budget of {limit:g} an hour"
    if name == GPUS:
        return f"a budget of {limit:g} GPUs"
    return f"{limit:g} {unit_of(name)}"


def unit_of(name: str) -> str:
    """What an amount of it is, for people."""
    if name == MONEY:
        return "an hour"
    if name == GPUS:
        return "GPUs"
    if name.startswith(_KIND):
        return f"GPUs of kind {name.removeprefix(_KIND)}"
    return name.removeprefix(_CLASS)


@dataclass(frozen=True, slots=True)
class Rung:
    """One capacity that a pool may have. Shares lie between 0 and 1."""

    units: float
    uses: Uses
    attainment: float
    """Predicted share of requests within the target."""
    served: float = 1.0
    """Share of the demand that it has capacity for."""

    @property
    def price_per_hour(self) -> float:
        """What it costs."""
        return self.uses.get(MONEY, 0.0)


@dataclass(frozen=True, slots=True)
class ClassOfClaim:
    """One replica of a class, as the pool of a claim uses it."""

    speed: float = 1.0
    """In units of rungs."""
    price_per_hour: float = 0.0
    usable: bool = True
    """Whether it can meet the pool's target."""
    gpus: int = 0
    kinds: tuple[str, ...] = ()
    """What its GPUs count in beside `GPUS`."""

    def takes(self, name: str) -> float:
        """What one takes of an amount."""
        if name == MONEY:
            return self.price_per_hour
        return float(self.gpus) if name == GPUS or name in self.kinds else 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one pool wants: its rungs, from the least that it must have to all that it wants. Several rungs may have the
    same units, of different classes."""

    rungs: tuple[Rung, ...]
    weight: float = 1.0
    """Requests per second: a share of more requests is worth more."""
    classes: Mapping[str, ClassOfClaim] = field(default_factory=dict)
    """By what stands for each in `Uses`."""
    wanted: Uses | None = None
    """What the pool is to have, by the decision that made this claim: near one of the rungs. None: not decided yet."""
    standbys: Uses = field(default_factory=dict)
    """What it is to have on standby beside `wanted`, of what no claim takes."""
    ends_soon: bool | None = None
    """Whether one of its replicas ends without waiting for anything. None: that is told by speeds and units."""


@dataclass(frozen=True, slots=True)
class _Step:
    gain: tuple[float, float, float]
    rung: int


def share(claims: Sequence[Claim], limits: Uses, start: Sequence[int] = ()) -> tuple[int, ...]:
    """The rung of each claim, climbed from `start`, where all keep what they have. Default: from the lowest, and one
    may get other classes so that another has room. `start` is always given; beyond it no limit is exceeded."""
    at = list(start) or _lowest(claims, limits)
    while True:
        at = _climb(claims, at, limits)
        after = None if start else _with_room_made(claims, at, limits)
        if after is None:
            return tuple(at)
        at = after


def climbed_alone(claims: Sequence[Claim], limits: Uses) -> list[tuple[int, ...]]:
    """The rungs of all claims, from the lowest on, as they climb where there is room for all of them: one rung of one
    claim at a time, in the order of what steps save."""
    at = [0] * len(claims)
    found = [tuple(at)]
    while True:
        able = [
            (steps[0], -_climbed(claim, at[number]), -number)
            for number, claim in enumerate(claims)
            if (steps := _steps(claim, at[number], limits))
        ]
        if not able:
            return found
        step, _, place = max(able, key=lambda one: (one[0].gain, *one[1:]))
        while at[-place] < step.rung:
            at[-place] += 1
            found.append(tuple(at))


def _lowest(claims: Sequence[Claim], limits: Uses) -> list[int]:
    """The lowest rungs; others of their capacity where those have no room beside each other."""
    at = [0] * len(claims)
    same = [_same_capacity(claim, 0) for claim in claims]
    return _exchanged(claims, at, limits, same, frozenset(), [MOST_EXCHANGES]) or at


def _climb(claims: Sequence[Claim], at: Sequence[int], limits: Uses) -> list[int]:
    """Step by step, as long as one fits."""
    at = list(at)
    left = left_of(claims, at, limits)
    steps = [_steps(claim, rung, limits) for claim, rung in zip(claims, at, strict=True)]
    places = [_first_fit(claim, at[number], steps[number], left) for number, claim in enumerate(claims)]
    while True:
        able = [
            (found[at_], n)
            for n, (found, at_) in enumerate(zip(steps, places, strict=True))
            if at_ < len(found)
        ]
        if not able:
            return at
        # Of equal ones the claim that has climbed least, of these the first, and there the smallest step.
        step, number = max(
            able, key=lambda one: (one[0].gain, -_climbed(claims[one[1]], at[one[1]]), -one[1])
        )
        here, there = claims[number].rungs[at[number]], claims[number].rungs[step.rung]
        at[number] = step.rung
        steps[number] = _steps(claims[number], step.rung, limits)
        left = left_of(claims, at, limits)
        # Where nothing has become free, what did not fit before does not now.
        freed = any(_more(here, there, name) < -_TINY for name in left)
        places = [
            _first_fit(claim, at[n], steps[n], left, 0 if freed or n == number else places[n])
            for n, claim in enumerate(claims)
        ]


def _with_room_made(claims: Sequence[Claim], at: Sequence[int], limits: Uses) -> list[int] | None:
    """The rungs once one claim has climbed that found no room, and others have the same capacity of other classes."""
    if min(left_of(claims, at, limits).values(), default=0.0) < -_TINY:
        return None
    same = [_same_capacity(claim, rung) for claim, rung in zip(claims, at, strict=True)]
    if not any(same):
        return None
    steps = [
        (step, number)
        for number, claim in enumerate(claims)
        for step in _steps(claim, at[number], limits)
        if claim.rungs[step.rung].units > claim.rungs[at[number]].units + _TINY
    ]
    tries = [MOST_EXCHANGES]
    for step, number in sorted(steps, key=lambda one: (one[0].gain, -one[1]), reverse=True):
        climbed = [step.rung if place == number else rung for place, rung in enumerate(at)]
        found = _exchanged(claims, climbed, limits, same, frozenset((number,)), tries)
        if found is not None:
            return found
    return None


def _same_capacity(claim: Claim, at: int) -> list[int]:
    """Other rungs that are worth no less."""
    here = claim.rungs[at]
    return [
        number
        for number, rung in enumerate(claim.rungs)
        if number != at
        and abs(rung.units - here.units) <= _TINY
        and rung.attainment >= here.attainment - _TINY
        and rung.served >= here.served - _TINY
    ]


def _exchanged(
    claims: Sequence[Claim],
    at: list[int],
    limits: Uses,
    same: Sequence[Sequence[int]],
    done: frozenset[int],
    tries: list[int],
    left: Uses | None = None,
) -> list[int] | None:
    """Within the limits, once claims that are not `done` have given up what is exceeded, one after the other."""
    left = left_of(claims, at, limits) if left is None else left
    short = [name for name, amount in left.items() if amount < -_TINY]
    if not short:
        return at
    for number, others in enumerate(same):
        now = claims[number].rungs[at[number]].uses
        for rung in () if number in done else others:
            then = claims[number].rungs[rung].uses
            if all(then.get(name, 0.0) > now.get(name, 0.0) - _TINY for name in short):
                continue
            if tries[0] <= 0:
                return None
            tries[0] -= 1
            changed = [*at[:number], rung, *at[number + 1 :]]
            after = {name: amount + now.get(name, 0.0) - then.get(name, 0.0) for name, amount in left.items()}
            found = _exchanged(claims, changed, limits, same, done | {number}, tries, after)
            if found is not None:
                return found
    return None


def left_of(claims: Sequence[Claim], at: Sequence[int], limits: Uses) -> dict[str, float]:
    """What these rungs leave of each limit; negative: they take more."""
    taken = [claim.rungs[rung].uses for claim, rung in zip(claims, at, strict=True)]
    return {name: limit - sum(uses.get(name, 0.0) for uses in taken) for name, limit in limits.items()}


def _climbed(claim: Claim, rung: int) -> float:
    return rung / max(1, len(claim.rungs) - 1)


def _steps(claim: Claim, before: int, limits: Uses) -> list[_Step]:
    """All steps from a rung, the best first."""
    found = [_Step(_gain(claim, before, rung, limits), rung) for rung in range(before + 1, len(claim.rungs))]
    return sorted(found, key=lambda step: (step.gain, -step.rung), reverse=True)


def _first_fit(
    claim: Claim, before: int, steps: Sequence[_Step], left: Mapping[str, float], begin: int = 0
) -> int:
    """The place of the first step that fits, from `begin` on; behind the last: none. It runs for each claim after each
    step of any: most are out by the first thing that is looked at."""
    here = claim.rungs[before]
    exceeded = [name for name, amount in left.items() if amount < -_TINY]
    room = [(name, here.uses.get(name, 0.0) + max(amount, 0.0) + _TINY) for name, amount in left.items()]
    for place in range(begin, len(steps)):
        there = claim.rungs[steps[place].rung]
        climbs = there.units > here.units + _TINY
        # The same capacity of other classes is only for what is otherwise exceeded.
        if not climbs and not any(_more(here, there, name) < -_TINY for name in exceeded):
            continue
        uses = there.uses
        for name, most in room:
            if uses.get(name, 0.0) > most:
                break
        else:
            return place
    return len(steps)


def _more(here: Rung, there: Rung, name: str) -> float:
    return there.uses.get(name, 0.0) - here.uses.get(name, 0.0)


def _gain(claim: Claim, before: int, after: int, limits: Uses) -> tuple[float, float, float]:
    """What a step saves, for each share of the scarcest thing that it takes."""
    low, high = claim.rungs[before], claim.rungs[after]
    taken = max((_part(low, high, name, limit) for name, limit in limits.items()), default=0.0)
    price = max(taken, _TINY)
    return (
        round(claim.weight * (high.attainment - low.attainment) / price, 9),
        round(claim.weight * (high.served - low.served) / price, 9),
        (high.units - low.units) / price,
    )


def _part(low: Rung, high: Rung, name: str, limit: float) -> float:
    return _more(low, high, name) / max(limit, _TINY)
