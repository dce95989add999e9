"""Plans of several models as one: coordinators keep one plan at a time, whoever sent it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoscaler.control_loop import Rotation
from autoscaler.reconcile import PlannedRotation
from autoscaler.snapshot import PoolName
from splitserve.v1 import scaling_pb2


class _Part(NamedTuple):
    """One model's part, and when it came."""

    at_s: float
    where: PlannedRotation


class MergedPlans:
    """The last plan of each model. One that is older than `valid_s` counts no more, as if it had expired."""

    def __init__(self, valid_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._valid_s, self._clock = valid_s, clock
        self._parts: dict[str, _Part] = {}

    def rotation(self, model: str, inner: Rotation) -> Rotation:
        """Tells `inner` the plans of all models whenever this one has a new one."""
        return _ModelRotation(self, model, inner)

    def with_plan(self, model: str, where: PlannedRotation) -> PlannedRotation:
        """Keeps a model's plan, and gives it with the others that hold. What one takes out of rotation is out of it."""
        now_s = self._clock()
        self._parts[model] = _Part(now_s, where)
        parts = [part.where for part in self._parts.values() if part.at_s >= now_s - self._valid_s]
        resting = {name for part in parts for name in part.standby}
        leanings: dict[str, PoolName] = {}
        for part in parts:
            leanings |= part.leanings
        return PlannedRotation(
            standby=frozenset(resting),
            active=frozenset(name for part in parts for name in part.active) - resting,
            sleeping=frozenset(name for part in parts for name in part.sleeping),
            leanings=leanings,
            movable=frozenset(name for part in parts for name in part.movable),
            lend=any(part.lend for part in parts),
        )


@dataclass(frozen=True, slots=True)
class _ModelRotation:
    plans: MergedPlans
    model: str
    inner: Rotation

    async def apply(self, where: PlannedRotation, decisions: Sequence[scaling_pb2.PoolDecision]) -> None:
        """See `Rotation`."""
        for decision in decisions:
            decision.model = self.model
        await self.inner.apply(self.plans.with_plan(self.model, where), decisions)
