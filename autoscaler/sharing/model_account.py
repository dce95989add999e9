"""One model's part in a shared account: its actuator and its decisions as the account sees them.

The control loop knows nothing of it. What its actuator lists is what the model has, what it starts is taken from the
account first, and each decision sees what the others have and claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autoscaler.actuators.actuator import (
    ORDINARY,
    ActualReplica,
    Actuator,
    ReplicaKind,
    counted,
    where_they_lean,
)
from autoscaler.classes.class_demand import gpus_of
from autoscaler.classes.neutral.neutral_claim import NEUTRAL
from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.sharing.claims.shared_view import summed
from autoscaler.sharing.claims.shares import GPUS, MONEY, Uses, counted_in, of_class
from autoscaler.sharing.shared_account import Holding, SharedAccount
from autoscaler.snapshot import LEAVING, POOLS, PoolName, Replica, Snapshot
from splitserve.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError

HEARD = frozenset({"DOCKER", "CHANGED_MEANWHILE", "HOST_UNKNOWN"})
"""Reasons of an UnavailableError by which an order was certainly not carried out."""


def uses_of(
    rules: ScalingPolicy, pool: PoolName, replica_class: str, limits: Iterable[str] = ()
) -> dict[str, float]:
    """What one replica takes of what may be limited; GPUs of kinds where they are among `limits`."""
    settings = rules.pools[pool]
    uses = {GPUS: float(gpus_of(settings, replica_class))}
    if settings.classes:
        kind = settings.class_named(replica_class)
        uses |= dict.fromkeys(counted_in(kind.gpu, limits), uses[GPUS])
        uses |= {MONEY: kind.price_per_hour, of_class(kind.name): 1.0}
        if replica_class:  # also where the policy has it no more: the machine is what it is
            uses[of_class(replica_class)] = 1.0
    return uses


def claimed_as(rules: ScalingPolicy, pool: PoolName) -> str:
    """What claims for the replicas of a pool: itself, or both pools as one where neutral workers have classes."""
    return NEUTRAL if rules.workers == "neutral" and rules.prefill.classes else pool


class ModelAccount:
    """`rules` gives the policy that is in force."""

    def __init__(self, account: SharedAccount, model: str, rules: Callable[[], ScalingPolicy]) -> None:
        self.account, self.model, self._rules = account, model, rules
        self._listed: Sequence[ActualReplica] | None = None
        self._seen: Mapping[str, Replica] = {}
        self._leanings: Mapping[str, PoolName] = {}
        self._last_uses: dict[tuple[PoolName, str], Uses] = {}
        """By pool and class, of what exists."""

    def deciding(self, decide: Decide) -> Decide:
        """The same decider, which sees the account, and whose claims the account gets."""

        def decide_within(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
            plan, after = decide(memory, self.seen(snapshot))
            self.decided(plan)
            return plan, after

        return decide_within

    def seen(self, snapshot: Snapshot) -> Snapshot:
        """What a decision is made of: the snapshot, of which the account learns first, and the account."""
        self._see(snapshot)
        return self.within(snapshot)

    def decided(self, plan: ScalingPlan) -> None:
        """The account learns what a decision wants."""
        self.account.claim(self.model, plan.claims, plan.worth_moving)

    def within(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the account as the model sees it now."""
        classed = any(pool.classes for pool in self._rules().pools.values())
        inventory = None if classed else snapshot.gpu_inventory
        return replace(snapshot, shared=self.account.view(self.model, inventory))

    def listed(self, replicas: Sequence[ActualReplica], generation: int) -> None:
        """What the actuator lists, asked in this generation of the account."""
        self._listed = replicas
        self.account.holds(self.model, self._holding(), generation)

    def reserve(self, pool: PoolName, count: int, replica_class: str) -> int:
        """Takes what these replicas use from the account: see `SharedAccount.reserve`."""
        each = self.uses_of(pool, replica_class)
        return self.account.reserve(self.model, claimed_as(self._rules(), pool), count, each)

    def uses_of(self, pool: PoolName, replica_class: str) -> Uses:
        """What one replica takes by the policy that is in force; of a class that it has no more, what it took last."""
        rules = self._rules()
        uses = uses_of(rules, pool, replica_class, self.account.limits)
        if any(one.name == replica_class for one in rules.pools[pool].classes):
            return uses
        return self._last_uses.get((pool, replica_class), uses)

    def _see(self, snapshot: Snapshot) -> None:
        """Workers say themselves of which class they are, and that they are leaving."""
        there = (*snapshot.prefill.replicas, *snapshot.decode.replicas)
        self._seen = {one.name: one for one in there if one.registered}
        self._leanings = snapshot.leanings
        if self._listed is not None:
            self.account.corrected(self.model, self._holding())

    def _holding(self) -> Holding:
        used: list[Uses] = []
        rules = self._rules()
        live: dict[str, list[Uses]] = {claimed_as(rules, pool): [] for pool in POOLS}
        last: dict[tuple[PoolName, str], Uses] = {}
        for one in where_they_lean(counted(self._listed or (), self._seen.keys()), self._leanings):
            known = self._seen.get(one.name)
            kind = one.replica_class or (known.replica_class if known is not None else "")
            uses = self.uses_of(one.pool, kind)
            used.append(uses)
            if kind:
                last[one.pool, kind] = uses
            if not one.stopping and (known is None or known.state not in LEAVING):
                live[claimed_as(rules, one.pool)].append(uses)
        self._last_uses = last
        return Holding(summed(used), {pool: summed(uses) for pool, uses in live.items()})


class AccountedActuator(Actuator):
    """Another actuator, which starts nothing that the account has no room for."""

    def __init__(
        self,
        inner: Actuator,
        account: ModelAccount,
        starting: asyncio.Lock,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """`starting` is common to the actuators of all models: two that chose a place at the same moment would choose
        the same. `may_act`: whether the lease is still held, once it is one's turn."""
        self._inner, self._account, self._starting, self._may_act = inner, account, starting, may_act
        self.proves_end = inner.proves_end

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        generation = self._account.account.generation
        found = await self._inner.replicas()
        if self._inner.lists_all:
            self._account.listed(found, generation)
        return found

    async def tidy(self) -> None:
        """See Actuator."""
        await self._inner.tidy()

    @property
    def lists_all(self) -> bool:
        """See Actuator."""
        return self._inner.lists_all

    @property
    def gpu_inventory(self) -> int | None:
        """See Actuator."""
        return self._inner.gpu_inventory

    @property
    def hosts(self) -> Mapping[str, bool]:
        """See Actuator."""
        return self._inner.hosts

    async def start(self, pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        """See Actuator. Raises UnavailableError (SHARED_BUDGET, SHARED_UNKNOWN) where the account has no room for all
        of them; those that it has room for stay ordered. Raises FailedPreconditionError (STALE_LEASE) where another
        may act meanwhile."""
        async with self._starting:
            if not self._may_act():
                message = f"{pool}: the lease has ended while others were being started"
                raise FailedPreconditionError(message, reason="STALE_LEASE")
            able = self._account.reserve(pool, count, kind.replica_class)
            try:
                # What has been refused is no more on the account once the next list says so.
                await self._inner.start(pool, able, kind)
            except (asyncio.CancelledError, DeadlineExceededError, UnavailableError) as error:
                if not isinstance(error, UnavailableError) or error.reason not in HEARD:
                    self._account.account.unheard(self._account.model, able)
                raise
        if able < count:
            message = f"budget: {able} of {count} {pool} replicas had room beside what other models have"
            raise UnavailableError(message, reason="SHARED_BUDGET")

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        await self._inner.stop(pool, names, drain_s)

    async def close(self) -> None:
        """See Actuator."""
        await self._inner.close()
