"""The account of one inventory that several models share: what each has, has ordered and claims.

What is shared is never exceeded: nothing is ordered but through `reserve`, which counts all that exists, what drains
included, and all that was ordered and is not listed yet. Until each model has said what it has and wants, nobody gets
more; one that says nothing of its wishes is waited for a while only.
One event loop uses it; no call waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoscaler.sharing.claims.shared_view import P, Pool, SharedView, summed
from autoscaler.sharing.claims.shares import GPUS, Claim, Rung, Uses
from splitserve.errors import UnavailableError

STALE_S = 60.0
"""A model that has not decided for so long, or for `STALE_INTERVALS` of its own, claims what it has, and no more."""
STALE_INTERVALS = 3
UNHEARD_S = 60.0
"""An order of which nobody knows whether it is carried out counts for so long, whatever is listed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What exists of one model."""

    used: Uses
    """All of it."""
    live: Mapping[str, Uses]
    """By pool, without what drains."""


@dataclass(slots=True)
class _Order:
    pool: str
    uses: Uses
    counts_until_s: float = -math.inf
    """Until then a list does not end it."""


@dataclass(slots=True)
class _Entry:
    least: Callable[[], Uses]
    """What it must be able to have before it has decided."""
    holding: Holding | None = None
    """None: not known yet."""
    ordered: list[_Order] = field(default_factory=list)
    """Not on a list yet, or of unknown outcome."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    claimed_s: float = -math.inf

    @property
    def used(self) -> dict[str, float]:
        here = [] if self.holding is None else [self.holding.used]
        return summed([*here, *(order.uses for order in self.ordered)])

    def shares(self, limits: Uses) -> frozenset[str]:
        """What it claims of that is limited: by the account, or GPUs, of which the actuator has so many."""
        uses = [rung.uses.keys() for claim in self.claims.values() for rung in claim.rungs]
        return frozenset().union(*uses) & {*limits, GPUS}

    def live(self) -> dict[str, Uses]:
        """By pool."""
        here = {} if self.holding is None else dict(self.holding.live)
        for order in self.ordered:
            here[order.pool] = summed([here.get(order.pool, {}), order.uses])
        return here


class SharedAccount:
    """`limits` are for all models together; what they do not name is not limited."""

    def __init__(
        self,
        limits: Uses,
        least: Mapping[str, Callable[[], Uses]],
        *,
        move_after_s: float = 0.0,
        interval_s: Callable[[str], float] = lambda _model: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least`: by model, what it must be able to have before its first decision. What others have is taken only
        once that was worth it for `move_after_s`. `interval_s`: how often a model decides."""
        self.limits = dict(limits)
        self.move_after_s = move_after_s
        self._entries = {model: _Entry(one) for model, one in sorted(least.items())}
        self._clock, self._began_s, self._interval_s = clock, clock(), interval_s
        self._moving_since_s: dict[str, float] = {}
        """By limit: those who do not share it know nothing of what is worth moving there."""
        self._generation = 0

    @property
    def generation(self) -> int:
        """A list that was begun in an earlier one says nothing now."""
        return self._generation

    @property
    def unknown(self) -> list[str]:
        """Models of which it is not known what they have or, for a while, what they want."""
        waited_s = self._clock() - self._began_s
        return [
            model
            for model, entry in self._entries.items()
            if entry.holding is None or (entry.claimed_s == -math.inf and waited_s < self._stale_s(model))
        ]

    @property
    def used(self) -> Mapping[str, Mapping[str, float]]:
        """What each model has and has ordered."""
        return {model: entry.used for model, entry in self._entries.items()}

    def left_for(self, model: str) -> dict[str, float]:
        """What the others leave of each limit: what the model has, and what nobody has."""
        others = summed([entry.used for name, entry in self._entries.items() if name != model])
        return {name: max(0.0, limit - others.get(name, 0.0)) for name, limit in self.limits.items()}

    def forget(self) -> None:
        """Another may have acted until now: what there is has to be looked at anew."""
        self._generation += 1
        for entry in self._entries.values():
            entry.holding = None

    def holds(self, model: str, holding: Holding, generation: int) -> None:
        """A list that was begun in this generation, after the model's last order had been answered."""
        if generation == self._generation:
            entry, now_s = self._entries[model], self._clock()
            entry.holding = holding
            entry.ordered = [order for order in entry.ordered if order.counts_until_s > now_s]

    def corrected(self, model: str, holding: Holding) -> None:
        """The same list, better understood. What was ordered since stays."""
        entry = self._entries[model]
        if entry.holding is not None:
            entry.holding = holding

    def claim(self, model: str, claims: Mapping[P, Claim], worth_moving: bool) -> None:
        """What a decision of the model wants."""
        entry, now_s = self._entries[model], self._clock()
        entry.claims, entry.claimed_s = {str(pool): one for pool, one in claims.items()}, now_s
        for name in entry.shares(self.limits):
            if worth_moving:
                self._moving_since_s.setdefault(name, now_s)
            else:
                self._moving_since_s.pop(name, None)

    def view(self, model: str, inventory: int | None = None) -> SharedView:
        """For a decision of the model. `inventory`: GPUs that it and the others that claim GPUs have and may get, where
        the account has no limit of them."""
        now_s = self._clock()
        limits, used = dict(self.limits), {name: entry.used for name, entry in self._entries.items()}
        others = {name: entry for name, entry in self._entries.items() if name != model}
        sharing = list(others)
        if GPUS not in limits and inventory is not None:
            sharing = [name for name, entry in others.items() if _shares_inventory(entry)]
            limits[GPUS] = inventory + sum(used[name].get(GPUS, 0.0) for name in sharing)
            used = {
                name: uses if name in (model, *sharing) else {n: a for n, a in uses.items() if n != GPUS}
                for name, uses in used.items()
            }
        live: dict[Pool, Uses] = {
            (name, pool): uses for name, entry in self._entries.items() for pool, uses in entry.live().items()
        }
        claims: dict[Pool, Claim] = {}
        for name, entry in others.items():
            stale = now_s - entry.claimed_s > self._stale_s(name)
            own = {"": _as_it_is(entry, name in sharing)} if stale else entry.claims
            claims |= {(name, pool): claim for pool, claim in own.items()}
        may_move = self._may_move(self._entries[model], now_s)
        mine = self._entries[model].claims.items()
        decided = {pool: claim.wanted for pool, claim in mine if claim.wanted is not None}
        return SharedView(model, limits, used, live, claims, may_move, decided)

    def reserve(self, model: str, pool: str, count: int, each: Uses) -> int:
        """Takes what `count` replicas use, or as many of them as there is room for, and returns how many; at least 1.

        Raises UnavailableError: SHARED_UNKNOWN while it is not known what a model has, SHARED_BUDGET where there is no
        room for one."""
        if unknown := self.unknown:
            what = f"what {', '.join(unknown)} has and wants is not known yet"
            message = f"budget: {what}; nothing is started for {model}"
            raise UnavailableError(message, reason="SHARED_UNKNOWN")
        for number in range(count):
            short = [name for name in self.limits if self._is_short(name, each.get(name, 0.0))]
            if short and not number:
                raise UnavailableError(self._full(model, short[0], each), reason="SHARED_BUDGET")
            if short:
                return number
            self._entries[model].ordered.append(_Order(pool, each))
        return count

    def unheard(self, model: str, count: int) -> None:
        """Nobody knows whether the model's last `count` orders are carried out, or will be yet."""
        ordered, until_s = self._entries[model].ordered, self._clock() + UNHEARD_S
        for order in ordered[len(ordered) - count :]:
            order.counts_until_s = until_s

    def _may_move(self, entry: _Entry, now_s: float) -> bool:
        """By what it shares; before it claims anything, by all that anybody does."""
        names = entry.shares(self.limits) or self._moving_since_s.keys()
        return any(now_s - self._moving_since_s.get(name, math.inf) >= self.move_after_s for name in names)

    def _stale_s(self, model: str) -> float:
        return max(STALE_S, STALE_INTERVALS * self._interval_s(model))

    def _is_short(self, name: str, amount: float) -> bool:
        used = sum(entry.used.get(name, 0.0) for entry in self._entries.values())
        return amount > 0 and used + amount > self.limits[name] + 1e-9

    def _full(self, model: str, name: str, each: Uses) -> str:
        who = SharedView(model, self.limits, self.used).who(name)
        return (
            f"budget: one more for {model} takes {each[name]:g} of {name}, and of {self.limits[name]:g} for all models "
            f"{who}"
        )


def _shares_inventory(entry: _Entry) -> bool:
    """Whether the GPUs that it has are among those of the actuator that are shared: not where it has classes."""
    return GPUS in entry.least() or any(GPUS in claim.rungs[0].uses for claim in entry.claims.values())


def _as_it_is(entry: _Entry, with_gpus: bool) -> Claim:
    """Of a model that has not decided lately: what it has, or the least that it must have."""
    used, least = entry.used, entry.least()
    names = (used.keys() | least.keys()) - (set() if with_gpus else {GPUS})
    uses = {name: max(used.get(name, 0.0), least.get(name, 0.0)) for name in names}
    return Claim((Rung(0.0, uses, 0.0),))
