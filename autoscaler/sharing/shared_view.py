"""What a model's decision knows of the others on the same inventory. Pure, plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autoscaler.sharing.shares import Claim, Split, Uses, left_of, settled_share

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

    def free(self, name: str) -> float:
        """What nobody has of a limit."""
        return max(0.0, self.limits[name] - sum(uses.get(name, 0.0) for uses in self.used.values()))

    def own(self, name: str) -> float:
        """What this model has."""
        return self.used.get(self.model, {}).get(name, 0.0)

    def granted(self, own: Mapping[P, Claim]) -> ModelShare:
        """What this model may have, with these claims of its own by pool. All models reckon alike: in the order of
        their names."""
        claims: dict[Pool, Claim] = {(self.model, pool): claim for pool, claim in own.items()}
        claims |= self.others
        order = sorted(claims)
        known = [claims[one] for one in order]
        held = [self.live.get(one, {}) for one in order]
        split: Split = settled_share(known, self.limits, held, self.may_move)
        rungs = dict(zip(order, split.rungs, strict=True))
        left = left_of(known, split.rungs, self.limits)
        mine = tuple(rungs[self.model, pool] for pool in own)
        return ModelShare(mine, {name: max(0.0, amount) for name, amount in left.items()}, split.worth_moving)

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
