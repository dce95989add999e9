"""What is limited (money, GPUs, replicas of a class), shared by several pools, of one model or of several. Pure.

Each pool has a ladder: what it takes to have ever more of what it wants, and which share of its requests would then
meet the target. From the lowest rungs on, the next step goes where it saves most predicted attainment for what it
takes of the scarcest thing, as a share of all there is of it. A step may climb several rungs at once: one replica more
of an overloaded pool may save nothing, and the third one all. Where no step saves any attainment, the share of the
demand that is served counts, then what was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_TINY = 1e-9
MOST_EXCHANGES = 500
"""Tried at a time: more models and classes would take a decision too long."""
WORTH_MOVING = 0.1
"""What others have is taken only if that lowers the loss of all together by this share."""

Uses = Mapping[str, float]
"""Amounts by what is limited: `MONEY` an hour, `GPUS`, replicas of a class."""
MONEY, GPUS = "money", "gpus"
AMOUNTS = (MONEY, GPUS)
"""What each replica takes some of, by its class; the others are places."""


def of_class(name: str) -> str:
    """What stands for the replicas of a class in `Uses`."""
    return f"class {name}"


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

    def takes(self, name: str) -> float:
        """What one takes of an amount."""
        return {MONEY: self.price_per_hour, GPUS: float(self.gpus)}[name]


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
    while True:
        able = [
            (step, number)
            for number, claim in enumerate(claims)
            if (step := _first_fit(claim, at[number], steps[number], left)) is not None
        ]
        if not able:
            return at
        # Of equal ones the claim that has climbed least, of these the first, and there the smallest step.
        step, number = max(
            able, key=lambda one: (one[0].gain, -_climbed(claims[one[1]], at[one[1]]), -one[1])
        )
        at[number] = step.rung
        steps[number] = _steps(claims[number], step.rung, limits)
        left = left_of(claims, at, limits)


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
) -> list[int] | None:
    """Within the limits, once claims that are not `done` have given up what is exceeded, one after the other."""
    short = [name for name, left in left_of(claims, at, limits).items() if left < -_TINY]
    if not short:
        return at
    for number, others in enumerate(same):
        for rung in () if number in done else others:
            now, then = claims[number].rungs[at[number]].uses, claims[number].rungs[rung].uses
            if all(then.get(name, 0.0) > now.get(name, 0.0) - _TINY for name in short):
                continue
            if tries[0] <= 0:
                return None
            tries[0] -= 1
            changed = [rung if place == number else one for place, one in enumerate(at)]
            found = _exchanged(claims, changed, limits, same, done | {number}, tries)
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


def _first_fit(claim: Claim, before: int, steps: Sequence[_Step], left: Mapping[str, float]) -> _Step | None:
    """It runs for each claim after each step of any: most are out by the first thing that is looked at."""
    here = claim.rungs[before]
    exceeded = [name for name, amount in left.items() if amount < -_TINY]
    for step in steps:
        there = claim.rungs[step.rung]
        climbs = there.units > here.units + _TINY
        # The same capacity of other classes is only for what is otherwise exceeded.
        if not climbs and not any(_more(here, there, name) < -_TINY for name in exceeded):
            continue
        if all(_more(here, there, name) <= max(amount, 0.0) + _TINY for name, amount in left.items()):
            return step
    return None


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
