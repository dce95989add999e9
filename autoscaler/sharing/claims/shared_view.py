"""What a model's decision knows of the others on the same inventory. Pure, plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autoscaler.sharing.claims.giving_way import Given, Split, gives_way, settled_share, standing
from autoscaler.sharing.claims.shares import Claim, Rung, Uses, left_of

P = TypeVar("P", bound=str)
Pool = tuple[str, str]
"""A model and one of its pools."""


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What a model may have now."""

    rungs: tuple[int, ...]
    """Of its claims."""
    left: Mapping[str, float]
    """What no claim takes, of each limit."""
    worth_moving: bool
    """See `Split`."""
    granted: Mapping[Pool, Rung] = field(default_factory=dict)
    """Of all models."""
    moved: bool = False
    """See `Split`."""
    lacking: Mapping[str, float] = field(default_factory=dict)
    """By how much the least of all models exceeds each limit."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What a model may have of GPUs that several share."""

    gpus: int
    among: str
    """All that there are, and who has them, for people."""
    worth_moving: bool = False
    """See `Split`."""


@dataclass(frozen=True, slots=True)
class SharedView:
    """The account of one inventory at one moment, as `model` sees it."""

    model: str
    limits: Uses
    """What all models may have together. What is not named has no limit."""
    used: Mapping[str, Uses]
    """By model: all that exists, what drains included, and what is ordered."""
    live: Mapping[Pool, Uses] = field(default_factory=dict)
    """Without what drains."""
    others: Mapping[Pool, Claim] = field(default_factory=dict)
    """Claims of the other models."""
    may_move: bool = True
    """See `settled_share`."""
    decided: Mapping[str, Uses] = field(default_factory=dict)
    """By pool of this model: what it is to have by its last decision."""

    def free(self, name: str) -> float:
        """What nobody has of a limit."""
        return max(0.0, self.limits[name] - sum(uses.get(name, 0.0) for uses in self.used.values()))

    def own(self, name: str) -> float:
        """What this model has."""
        return self.used.get(self.model, {}).get(name, 0.0)

    def granted(self, own: Mapping[P, Claim]) -> ModelShare:
        """What this model may have, with these claims of its own by pool. All models reckon alike: in the order of
        their names."""
        claims: dict[Pool, Claim] = {
            (self.model, pool): replace(claim, wanted=self.decided.get(pool)) for pool, claim in own.items()
        }
        claims |= self.others
        order = sorted(claims)
        known = [claims[one] for one in order]
        held = [self.live.get(one, {}) for one in order]
        split: Split = settled_share(known, self.limits, held, self.may_move)
        rungs = dict(zip(order, split.rungs, strict=True))
        granted = {one: claims[one].rungs[at] for one, at in rungs.items()}
        left = left_of(known, split.rungs, self.limits)
        mine = tuple(rungs[self.model, pool] for pool in own)
        usable = {name: self._left(name, max(0.0, amount), granted) for name, amount in left.items()}
        lacking = {name: -amount for name, amount in left.items() if amount < -1e-9}
        return ModelShare(mine, usable, split.worth_moving, granted, split.moved, lacking)

    def _left(self, name: str, left: float, granted: Mapping[Pool, Rung]) -> float:
        """What this model may use of what no rung takes. Each keeps what it has of it; what two keep is the first's."""
        keeps: dict[Pool, float] = {}
        for one, rung in granted.items():
            has, claim = self.live.get(one, {}).get(name, 0.0), self.others.get(one)
            if claim is not None and claim.wanted is not None:
                has = min(has, claim.wanted.get(name, 0.0) + claim.standbys.get(name, 0.0))
            keeps[one] = max(0.0, has - rung.uses.get(name, 0.0))
        mine = sum(amount for (model, _), amount in keeps.items() if model == self.model)
        before = sum(amount for (model, _), amount in keeps.items() if model < self.model)
        free = left - (sum(keeps.values()) - mine)
        return max(0.0, free, min(mine, left - before))

    def gives_way(self, own: Mapping[P, Claim], got: ModelShare) -> dict[P, Given]:
        """By pool of this model: the class of which one ends before what replaces it is there. `own` are decided."""
        claims: dict[Pool, Claim] = {(self.model, pool): claim for pool, claim in own.items()}
        claims |= self.others
        # Who has not decided lately claims what it has, as no pool's, and waits for nothing.
        order = [one for one in sorted(claims) if one in got.granted and one[1]]
        standings = [
            standing(claims[one], self.live.get(one, {}), got.granted[one].uses, got.granted[one].units)
            for one in order
        ]
        given = gives_way(standings, self.limits, summed(list(self.live.values())), got.moved)
        named = {order[number]: name for number, name in given.items()}
        return {pool: named[self.model, pool] for pool in own if (self.model, pool) in named}

    def who(self, name: str) -> str:
        """Who has how much, for people: "llama has 3, qwen 2"."""
        parts = [f"{model} {uses.get(name, 0.0):g}" for model, uses in sorted(self.used.items())]
        return ", ".join(parts).replace(" ", " has ", 1)


def summed(amounts: Sequence[Uses]) -> dict[str, float]:
    """All of them together."""
    total: dict[str, float] = {}
    for uses in amounts:
        for name, amount in uses.items():
            total[name] = total.get(name, 0.0) + amount
    return total
