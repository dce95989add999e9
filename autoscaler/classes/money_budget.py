"""A budget in money shared by several pools, of one model or of several. Pure.

Each pool has a ladder: what it costs to have ever more of what it wants, and which share of its requests would then
meet the target. From the lowest rungs on, the next money goes where it saves most predicted attainment for each unit
of money. A step may climb several rungs at once: one replica more of an overloaded pool may save nothing, and the
third one all. Where no step saves any attainment, the share of the demand that is served counts, then what was
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Rung:
    """One capacity that a pool may have. Shares lie between 0 and 1."""

    units: float
    price_per_hour: float
    attainment: float
    """Predicted share of requests within the target."""
    served: float = 1.0
    """Share of the demand that it has capacity for."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one pool wants: its rungs, from the least that it must have to all that it wants."""

    rungs: tuple[Rung, ...]
    weight: float = 1.0
    """Requests per second: a share of more requests is worth more."""


def share_budget(claims: Sequence[Claim], budget_per_hour: float) -> tuple[int, ...]:
    """The rung of each claim. The lowest rungs are always given; beyond them the budget is never exceeded."""
    at = [0] * len(claims)
    while True:
        left = budget_per_hour - sum(
            claim.rungs[rung].price_per_hour for claim, rung in zip(claims, at, strict=True)
        )
        steps = [
            (_gain(claim, at[number], rung), number, rung)
            for number, claim in enumerate(claims)
            for rung in range(at[number] + 1, len(claim.rungs))
            if _price(claim, at[number], rung) <= left + _TINY
        ]
        if not steps:
            return tuple(at)
        # Of equal ones the first claim, and there the smallest step.
        _, number, rung = max(steps, key=lambda step: (step[0], -step[1], -step[2]))
        at[number] = rung


def _price(claim: Claim, before: int, after: int) -> float:
    return claim.rungs[after].price_per_hour - claim.rungs[before].price_per_hour


def _gain(claim: Claim, before: int, after: int) -> tuple[float, float, float]:
    """What a step saves, for each unit of money."""
    low, high = claim.rungs[before], claim.rungs[after]
    price = max(_price(claim, before, after), _TINY)
    return (
        round(claim.weight * (high.attainment - low.attainment) / price, 9),
        round(claim.weight * (high.served - low.served) / price, 9),
        (high.units - low.units) / price,
    )
