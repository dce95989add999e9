"""Plans of several models as one: coordinators keep one plan at a time, whoever sent it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoscaler.control_loop import Rotation
from autoscaler.snapshot import PoolName
from splitserve.v1 import scaling_pb2


@dataclass(frozen=True, slots=True)
class _Part:
    """One model's part."""

    at_s: float
    standby: Sequence[str]
    active: Sequence[str]
    lend: bool
    leanings: Mapping[str, PoolName]
    sleeping: Sequence[str]


class MergedPlans:
    """The last plan of each model. One that is older than `valid_s` counts no more, as if it had expired."""

    def __init__(self, valid_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._valid_s, self._clock = valid_s, clock
        self._parts: dict[str, _Part] = {}

    def rotation(self, model: str, inner: Rotation) -> Rotation:
        """Tells `inner` the plans of all models whenever this one has a new one."""
        return _ModelRotation(self, model, inner)

    def with_plan(self, model: str, part: _Part) -> list[_Part]:
        """Keeps a model's plan, and gives those that hold."""
        self._parts[model] = part
        return [one for one in self._parts.values() if one.at_s >= part.at_s - self._valid_s]

    def now_s(self) -> float:
        """Seconds on this clock."""
        return self._clock()


@dataclass(frozen=True, slots=True)
class _ModelRotation:
    plans: MergedPlans
    model: str
    inner: Rotation

    async def apply(
        self,
        standby: Sequence[str],
        active: Sequence[str],
        lend: bool,
        decisions: Sequence[scaling_pb2.PoolDecision],
        leanings: Mapping[str, PoolName],
        sleeping: Sequence[str],
    ) -> None:
        """See `Rotation`."""
        mine = _Part(self.plans.now_s(), standby, active, lend, leanings, sleeping)
        parts = self.plans.with_plan(self.model, mine)
        resting = {name for part in parts for name in part.standby}
        for decision in decisions:
            decision.model = self.model
        leans: dict[str, PoolName] = {}
        for part in parts:
            leans |= part.leanings
        await self.inner.apply(
            sorted(resting),
            sorted({name for part in parts for name in part.active} - resting),
            any(part.lend for part in parts),
            decisions,
            leans,
            sorted({name for part in parts for name in part.sleeping}),
        )
