"""The control loop: observe, decide, reconcile, act; once per interval.

Failures are logged and retried at the next tick. A tick without a snapshot does nothing, so neither an unreachable
coordinator nor a failing actuator ever scales anything down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autoscaler.actuators.actuator import Actuator, ReplicaShape
from autoscaler.decisions import DecisionJournal, decisions_of
from autoscaler.lease import Lease
from autoscaler.loop_metrics import LoopStatus
from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import (
    Action,
    Activate,
    ChangeRole,
    Drain,
    PlannedRotation,
    Rest,
    Start,
    action_word,
    planned_rotation,
    reconcile,
)
from autoscaler.snapshot import Replica, Snapshot
from autoscaler.start_watch import StartWatch
from splitserve.errors import ConfigError, SplitserveError
from splitserve.logs import log_event
from splitserve.roles import POOLS, PoolName
from splitserve.runtime.waiting import within
from splitserve.v1 import scaling_pb2

CHANGE_ROLE_S = 60.0
"""How long a worker that was told to change its role counts in the new pool although it does not report the role
yet."""
OBSERVE_S = 10.0
"""Deadline of observing the coordinators and the actuator."""
ACT_S = 30.0
"""Deadline of each action."""
PLAN_INTERVALS = 4
"""A plan stays valid for this many missed ticks."""
LEAST_PLAN_S = 30.0


class Rotation(Protocol):
    """Tells the coordinators which workers are on standby, and which roles they have."""

    async def apply(
        self, where: PlannedRotation, decisions: Sequence[scaling_pb2.PoolDecision], valid_s: float
    ) -> None:
        """Puts replicas where the plan wants them; `decisions` explain it to people. Called at every tick. The plan
        expires after `valid_s` seconds: if the autoscaler dies, its standbys serve again. Raises SplitserveError."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A policy that takes the place of the one in force."""

    decide: Decide
    policy: ScalingPolicy
    carry: Callable[[Memory], Memory]
    """Turns the earlier policy's memory into the new policy's, as far as it applies."""


@dataclass(slots=True)
class ControlLoop:
    """Owns the policy's memory. `run` is its only task. Without an actuator nothing is acted on."""

    observe: Callable[[], Awaitable[Snapshot]]
    decide: Decide
    rotation: Rotation
    actuator: Actuator | None
    policy: ScalingPolicy
    dry_run: bool = False
    """Decide and log, but do not act."""
    lease: Lease | None = None
    """None: no other autoscaler may scale the same replicas."""
    changed_policy: Callable[[], PolicyChange | None] = lambda: None
    """Called before each tick. Raises ConfigError, once for each version of the policy file that is wrong."""
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits between ticks while a pool is at zero; may end sooner, when requests wait for workers."""
    status: LoopStatus = field(default_factory=LoopStatus)
    journal: DecisionJournal = field(default_factory=DecisionJournal)
    memory: Memory = None
    """The policy's memory between ticks."""
    _starts: StartWatch = field(default_factory=StartWatch)
    _own_names: frozenset[str] = frozenset()
    """Names of replicas that are ours or were, and that are still registered."""
    _changing_roles: dict[str, tuple[PoolName, float]] = field(default_factory=dict)
    """Workers that were told to change their roles and have not reported it yet, by name: the new pool, and until when
    they count there."""
    _now_s: float = 0.0
    """When the last snapshot was taken."""
    _last_plan: ScalingPlan | None = None

    async def run(self) -> None:
        """Ticks until cancelled. A tick longer than the interval is followed by the next one at once."""
        while True:
            began = time.monotonic()
            await self.tick()
            left_s = max(0.0, began + self.policy.interval_s - time.monotonic())
            at_zero = self._last_plan is not None and self._last_plan.is_at_zero
            await (self.pause if at_zero else asyncio.sleep)(left_s)

    async def tick(self) -> None:
        """One round. Errors that a later round may not meet are logged, not raised. While the policy fails, replicas
        that its last plan wants and that are missing are started."""
        self._take_policy()
        if self.lease is not None and self._would_act:
            await self.lease.renew()
        try:
            snapshot = await within(OBSERVE_S, self.observe(), "observe")
        except SplitserveError as error:
            self._failed("observe", error)
            return
        snapshot = self._starts.look(self._known(snapshot), self.policy.pools)
        decided = await self._decided(snapshot)
        plan = decided or self._last_plan
        if plan is None:
            return
        pools = self._pools(snapshot)
        pauses = {pool: self._starts.pause_s(pool, snapshot.now_s) for pool in POOLS}
        actions = reconcile(plan, pools, self.policy.pools, self._starts.paused(snapshot.now_s))
        if decided is None or not snapshot.complete:
            actions = tuple(action for action in actions if isinstance(action, Start | Activate))
        self.status.starts(self._starts.failed_starts, pauses, snapshot)
        acted = self._may_act
        if decided is not None:
            for pool in POOLS:
                if broken := plan.pool(pool).error:
                    self._failed("policy", ConfigError(broken), pool=pool)
            self._log_decision(plan, pools, actions)
        await self._carry_out(plan, pools, actions)
        if decided is not None:
            # Last, so that the journal, which people read, delays no action.
            self.journal.enter(snapshot, decisions_of(plan, pools, actions), acted)

    async def _decided(self, snapshot: Snapshot) -> ScalingPlan | None:
        """The plan, made on a thread: a forecast may take seconds. None when the policy raises: the counts are kept
        until a later tick decides."""
        try:
            plan, self.memory = await asyncio.to_thread(self.decide, self.memory, snapshot)
        except Exception as error:
            self._failed("policy", ConfigError(f"cannot decide: {type(error).__name__}: {error}"))
            return None
        return plan

    async def _carry_out(
        self, plan: ScalingPlan, pools: Mapping[PoolName, Sequence[Replica]], actions: Sequence[Action]
    ) -> None:
        if not self._may_act or not await self._rotate(plan, pools, actions):
            return
        assert self.actuator is not None
        try:
            await within(ACT_S, self.actuator.tidy(), "tidy")
        except SplitserveError as error:
            self._failed("tidy", error)
        for action in actions:
            if self._may_act:  # checked before each action: the lease may end during a long one
                await self._act(self.actuator, plan, action)

    @property
    def _would_act(self) -> bool:
        return self.actuator is not None and not self.dry_run

    @property
    def _may_act(self) -> bool:
        return self._would_act and (self.lease is None or self.lease.held)

    def _take_policy(self) -> None:
        try:
            change = self.changed_policy()
        except SplitserveError as error:
            self.status.policy_is_current = False
            self._failed("policy", error)
            return
        if change is not None:
            self._last_plan = None
            self.decide, self.policy = change.decide, change.policy
            self.memory = change.carry(self.memory)
            self.status.policy_is_current = True
            self.status.policy_reloads += 1

    def _known(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what only the loop knows."""
        self.status.holds_lease = self.lease is None or self.lease.held
        inventory = None
        if self.actuator is not None:
            self.status.hosts, inventory = dict(self.actuator.hosts), self.actuator.gpu_inventory
        self._now_s = snapshot.now_s
        self._changing_roles = {
            name: (pool, until_s)
            for name, (pool, until_s) in self._changing_roles.items()
            if snapshot.roles.get(name) not in (None, pool) and until_s > snapshot.now_s
        }
        return replace(snapshot, acting=self._may_act, gpu_inventory=inventory)

    def _pools(self, snapshot: Snapshot) -> dict[PoolName, tuple[Replica, ...]]:
        """The replicas of each pool. A worker that was told to change its role counts in its new pool."""
        there = [(pool, replica) for pool in POOLS for replica in snapshot.pool(pool).replicas]
        # The coordinators know a replica for a while after it has died. It remains one of ours meanwhile.
        ours = frozenset(replica.name for _, replica in there if replica.ours)
        registered = {replica.name for _, replica in there if replica.registered}
        self._own_names = ours | (self._own_names & registered)
        pools: dict[PoolName, list[Replica]] = {pool: [] for pool in POOLS}
        for pool, replica in there:
            if replica.ours or replica.both or replica.name not in self._own_names:
                in_pool, _ = self._changing_roles.get(replica.name, (pool, 0.0))
                pools[in_pool].append(replica)
        return {pool: tuple(members) for pool, members in pools.items()}

    async def _rotate(
        self, plan: ScalingPlan, pools: Mapping[PoolName, Sequence[Replica]], actions: Sequence[Action]
    ) -> bool:
        """Tells the coordinators. False when they say that another autoscaler acts."""
        valid_s = max(LEAST_PLAN_S, PLAN_INTERVALS * self.policy.interval_s)
        decisions = decisions_of(plan, pools, actions)
        applied = self.rotation.apply(planned_rotation(pools, actions), decisions, valid_s)
        try:
            await within(ACT_S, applied, "apply the plan")
        except SplitserveError as error:
            self._failed("rotate", error)
            if error.reason != "STALE_LEASE":
                return True
            if self.lease is not None:
                self.lease.lose()
            return False
        for action in actions:
            if isinstance(action, Activate | Rest | ChangeRole):
                self._acted(plan, action)
            if isinstance(action, ChangeRole):
                self._changing_roles[action.name] = action.pool, self._now_s + CHANGE_ROLE_S
        return True

    async def _act(self, actuator: Actuator, plan: ScalingPlan, action: Action) -> None:
        try:
            match action:
                case Start(pool, count):
                    of_pool = self.policy.pools[pool]
                    shape = ReplicaShape(of_pool.gpus_per_replica, of_pool.gpu)
                    started = actuator.start(pool, count, shape)
                    await within(ACT_S, started, "start")
                case Drain(pool, names):
                    self._starts.told_to_end(names)
                    stopped = actuator.stop(names, self.policy.pools[pool].drain_s)
                    await within(ACT_S, stopped, "stop")
                case Activate() | Rest() | ChangeRole():
                    return
        except SplitserveError as error:
            self._failed(action_word(action), error, pool=action.pool)
            return
        self._acted(plan, action)

    def _log_decision(
        self, plan: ScalingPlan, pools: Mapping[PoolName, Sequence[Replica]], actions: Sequence[Action]
    ) -> None:
        self.status.decided(plan, pools)
        changed = bool(actions) or self._last_plan is None or plan.numbers != self._last_plan.numbers
        self._last_plan = plan
        for pool in POOLS:
            wanted = plan.pool(pool)
            log_event(
                "scaling.decided",
                level=logging.INFO if changed else logging.DEBUG,
                pool=pool,
                desired=wanted.desired,
                standby=wanted.standby,
                reason=wanted.reason,
                actions=[action_word(action) for action in actions if action.pool == pool],
                dry_run=not self._would_act,
                acts=self._may_act,
                replicas=Counter(replica.state.value for replica in pools[pool]),
            )

    def _acted(self, plan: ScalingPlan, action: Action) -> None:
        self.status.actions[action_word(action)] += 1
        fields: dict[str, Any] = {"pool": action.pool, "action": action_word(action)}
        if isinstance(action, Start):
            fields["count"] = action.count
        else:
            fields["names"] = list(action.names)
        log_event("scaling.acted", reason=plan.pool(action.pool).reason, **fields)

    def _failed(self, hop: str, error: SplitserveError, **where: str) -> None:
        self.status.errors[hop] += 1
        fields = {"hop": hop, "error": error.message, "error_reason": error.reason}
        log_event("scaling.failed", level=logging.WARNING, **fields, **where)
