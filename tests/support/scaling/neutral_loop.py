"""The control loop with `workers: neutral` over any actuator, with coordinators that see what they are told to see, and
workers that lean where they are asked to."""

from __future__ import annotations

from typing import Any

from autoscaler.actuators.actuator import Actuator, Presence
from autoscaler.control_loop import ControlLoop, LoopSettings, Memory
from autoscaler.decisions.decider import Decider
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.reconcile import Bounds, PlannedRotation
from autoscaler.snapshot import (
    POOLS,
    DecodeSignals,
    PoolName,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)
from tests.support.waiting import PATIENCE_S


class NeutralLoop:
    """`leans` is what the coordinators see: workers in rotation, and where they lean."""

    def __init__(self, actuator: Actuator, gpus_each: int = 0) -> None:
        self.actuator = actuator
        self.leans: dict[str, PoolName] = {}
        self._asked: dict[str, PoolName] = {}
        self._plan = ScalingPlan(PoolPlan(1), PoolPlan(1))
        self._now_s = 0.0
        each: dict[PoolName, int] = dict.fromkeys(POOLS, gpus_each)
        drain_s: dict[PoolName, float] = dict.fromkeys(POOLS, 20.0)
        bounds: dict[PoolName, Bounds] = dict.fromkeys(POOLS, Bounds(0, 8))
        settings = LoopSettings(bounds=bounds, drain_s=drain_s, gpus_each=each, neutral=True)
        self._loop = ControlLoop(
            self._observe, self._decide, self, actuator, settings, decider=Decider(turn_s=PATIENCE_S)
        )

    async def tick(self, prefill: int, decode: int) -> None:
        """One decision for so many workers on each side, and what the workers do then."""
        self._plan = ScalingPlan(PoolPlan(prefill), PoolPlan(decode))
        self._now_s += 5.0
        await self._loop.tick()
        for name, pool in self._asked.items():
            if name in self.leans:
                self.leans[name] = pool

    async def all_seen(self) -> None:
        """The coordinators see every replica that is there and not on its way out, new ones where they were started."""
        there = {one.name: one.pool for one in await self.actuator.replicas() if _serves(one)}
        self.leans = {name: self.leans.get(name, pool) for name, pool in there.items()}

    @property
    def sides(self) -> tuple[int, int]:
        """How many are seen on each side."""
        prefill = sum(pool == "prefill" for pool in self.leans.values())
        return prefill, len(self.leans) - prefill

    async def apply(self, where: PlannedRotation, decisions: Any) -> None:
        """As the coordinators: they ask the workers."""
        self._asked = dict(where.leanings)

    async def _observe(self) -> Snapshot:
        seen: dict[PoolName, list[Replica]] = {pool: [] for pool in POOLS}
        for one in await self.actuator.replicas():
            pool = self.leans.get(one.name, one.pool)
            known = one.name in self.leans
            state = ReplicaState.READY if known else ReplicaState.STARTING
            state = ReplicaState.DRAINING if one.stopping else state
            seen[pool].append(Replica(one.name, state, self._now_s, registered=known, neutral=known))
        signals = PrefillSignals(tuple(seen["prefill"])), DecodeSignals(tuple(seen["decode"]))
        return Snapshot(self._now_s, *signals)

    def _decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return self._plan, memory


def _serves(replica: Any) -> bool:
    return not (replica.stopping or replica.placeholder) and replica.presence is Presence.HERE
