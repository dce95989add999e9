"""The control loop: observe, decide, reconcile, act, again every interval.

Whatever fails is logged and tried again at the next tick. A tick that could not see does nothing, so neither an
unreachable coordinator nor a failing actuator ever scales anything down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from autoscaler.actuator import ActualReplica, Actuator
from autoscaler.loop_metrics import LoopStatus
from autoscaler.plan import Decide, Memory, Plan
from autoscaler.reconcile import Action, Activate, Bounds, Drain, Member, Rest, Start, members, reconcile
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot
from splitserve.errors import DeadlineExceededError, SplitserveError
from splitserve.logs import log_event

T = TypeVar("T")


class Rotation(Protocol):
    """Who tells the coordinators which workers rest, and whether decode lends itself to prefill."""

    async def apply(self, standby: Sequence[str], active: Sequence[str], lend: bool) -> None:
        """Takes these workers out of rotation and those into it. Called at every tick. Raises SplitserveError."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop keeps to. Times in seconds."""

    bounds: Mapping[PoolName, Bounds]
    drain_s: Mapping[PoolName, float]
    interval_s: float = 15.0
    observe_s: float = 10.0
    """Deadline of looking at the coordinators, and of listing replicas."""
    act_s: float = 30.0
    """Deadline of each action."""
    dry_run: bool = False
    """Decide and log, but act on nothing."""


@dataclass(slots=True)
class ControlLoop:
    """Owns what the policy remembers. `run` is its only task.

    Without an actuator every worker that the coordinators see counts as ours, and nothing is acted on.
    """

    observe: Callable[[], Awaitable[Snapshot]]
    decide: Decide
    rotation: Rotation
    actuator: Actuator | None
    settings: LoopSettings
    status: LoopStatus = field(default_factory=LoopStatus)
    _memory: Memory = None
    _last_plan: Plan | None = None

    async def run(self) -> None:
        """Ticks until cancelled. A tick that took longer than the interval is followed by the next at once."""
        while True:
            began = time.monotonic()
            await self.tick()
            await asyncio.sleep(max(0.0, began + self.settings.interval_s - time.monotonic()))

    async def tick(self) -> None:
        """One round. Raises nothing that a later round could mend."""
        try:
            snapshot = await _within(self.settings.observe_s, self.observe(), "observe")
            actual = await self._replicas(snapshot)
        except SplitserveError as error:
            self._failed("observe", error)
            return
        plan, self._memory = self.decide(self._memory, snapshot)
        pools = _pools(snapshot, actual)
        actions = reconcile(plan, pools, self.settings.bounds)
        if not snapshot.complete:
            actions = tuple(action for action in actions if isinstance(action, Start | Activate))
        self._tell(plan, pools, actions)
        if self.settings.dry_run or self.actuator is None:
            return
        await self._rotate(plan, pools, actions)
        for action in actions:
            await self._act(self.actuator, plan, action)

    async def _replicas(self, snapshot: Snapshot) -> Sequence[ActualReplica]:
        if self.actuator is None:
            seen = {"prefill": snapshot.prefill.replicas, "decode": snapshot.decode.replicas}
            return [ActualReplica(replica.name, pool, False, 0.0) for pool in POOLS for replica in seen[pool]]
        return await _within(self.settings.observe_s, self.actuator.replicas(), "list replicas")

    async def _rotate(
        self, plan: Plan, pools: Mapping[PoolName, Sequence[Member]], actions: Sequence[Action]
    ) -> None:
        there = [member for pool in POOLS for member in pools[pool]]
        standby = {member.name for member in there if member.state is ReplicaState.STANDBY}
        active = {member.name for member in there if member.state is ReplicaState.READY}
        for action in actions:
            match action:
                case Activate(name=name):
                    standby.discard(name)
                    active.add(name)
                case Rest(name=name):
                    active.discard(name)
                    standby.add(name)
                case Drain(names=names):
                    # Out of rotation before it is told to end: no request meets a worker that refuses it.
                    active.difference_update(names)
                    standby.update(names)
                case Start():
                    pass
        applied = self.rotation.apply(sorted(standby), sorted(active), plan.lend_decode_to_prefill)
        try:
            await _within(self.settings.act_s, applied, "apply the plan")
        except SplitserveError as error:
            self._failed("rotate", error)
            return
        for action in actions:
            if isinstance(action, Activate | Rest):
                self._acted(plan, action)

    async def _act(self, actuator: Actuator, plan: Plan, action: Action) -> None:
        try:
            match action:
                case Start(pool, count):
                    await _within(self.settings.act_s, actuator.start(pool, count), "start")
                case Drain(pool, names):
                    stopped = actuator.stop(pool, names, self.settings.drain_s[pool])
                    await _within(self.settings.act_s, stopped, "stop")
                case Activate() | Rest():
                    return
        except SplitserveError as error:
            self._failed(_word(action), error, pool=action.pool)
            return
        self._acted(plan, action)

    def _tell(
        self, plan: Plan, pools: Mapping[PoolName, Sequence[Member]], actions: Sequence[Action]
    ) -> None:
        self.status.decided(plan, pools)
        news = bool(actions) or self._last_plan is None or _numbers(plan) != _numbers(self._last_plan)
        self._last_plan = plan
        for pool in POOLS:
            wanted, counts = plan.pool(pool), self.status.actual[pool]
            log_event(
                "scaling.decided",
                level=logging.INFO if news else logging.DEBUG,
                pool=pool,
                desired=wanted.desired,
                standby=wanted.standby,
                lend=plan.lend_decode_to_prefill,
                reason=wanted.reason,
                actions=[_word(action) for action in actions if action.pool == pool],
                dry_run=self.settings.dry_run or self.actuator is None,
                replicas={state.value: count for state, count in counts.items() if count},
            )

    def _acted(self, plan: Plan, action: Action) -> None:
        self.status.actions[_word(action)] += 1
        match action:
            case Start(count=count):
                what: dict[str, Any] = {"count": count}
            case Drain(names=names):
                what = {"names": list(names)}
            case Activate(name=name) | Rest(name=name):
                what = {"names": [name]}
        reason = plan.pool(action.pool).reason
        log_event("scaling.acted", pool=action.pool, action=_word(action), reason=reason, **what)

    def _failed(self, hop: str, error: SplitserveError, **where: str) -> None:
        self.status.errors[hop] += 1
        log_event(
            "scaling.failed",
            level=logging.WARNING,
            hop=hop,
            error=error.message,
            error_reason=error.reason,
            **where,
        )


def _pools(snapshot: Snapshot, actual: Sequence[ActualReplica]) -> dict[PoolName, tuple[Member, ...]]:
    seen = {r.name: r for r in (*snapshot.prefill.replicas, *snapshot.decode.replicas)}
    return {pool: members(pool, actual, seen) for pool in POOLS}


def _word(action: Action) -> str:
    return type(action).__name__.lower()


def _numbers(plan: Plan) -> tuple[object, ...]:
    wanted = [(plan.pool(pool).desired, plan.pool(pool).standby) for pool in POOLS]
    return *wanted, plan.lend_decode_to_prefill


async def _within(deadline_s: float, work: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineExceededError(f"{what}: not done within {deadline_s:g} s") from None
