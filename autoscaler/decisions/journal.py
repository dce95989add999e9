"""The last decisions, in memory: bounded, and filled in with what came once each window is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.classes.class_bill import pool_bill
from autoscaler.decisions.attainment import AttainmentModel, achieved, inputs_of
from autoscaler.decisions.decision import PoolOutcome, ScalingDecision
from autoscaler.plan import ScalingPlan
from autoscaler.plan_reasons import action_texts
from autoscaler.reconcile import Action, ReplicaView
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot

MOST_DECISIONS = 240
"""An hour of decisions at the default interval."""
LATE_WINDOWS = 2.0
"""What is looked at later than this many windows after a decision says nothing about it."""


@dataclass(slots=True)
class DecisionJournal:
    """Written by the control loop. `decisions`, oldest first, is replaced as a whole, so any thread may read it."""

    attainment: AttainmentModel = field(default_factory=AttainmentModel)
    decisions: tuple[ScalingDecision, ...] = ()
    snapshot: Snapshot | None = None
    """The one of the last decision."""
    _count: int = 0

    def enter(
        self,
        snapshot: Snapshot,
        plan: ScalingPlan,
        pools: Mapping[PoolName, Sequence[ReplicaView]],
        actions: Sequence[Action],
        acted: bool,
    ) -> None:
        """Keeps a decision, and fills in what this snapshot shows of earlier ones."""
        self._count += 1
        self.snapshot = snapshot
        made = ScalingDecision(
            number=self._count,
            at_s=snapshot.now_s,
            wall_s=snapshot.wall_s,
            window_s=snapshot.window_s,
            acted=acted,
            complete=snapshot.complete,
            pools={name: self._pool(name, snapshot, plan, pools[name], actions) for name in POOLS},
        )
        earlier = (_filled(one, snapshot) for one in self.decisions)
        self.decisions = (*earlier, made)[-MOST_DECISIONS:]

    def _pool(
        self,
        name: PoolName,
        snapshot: Snapshot,
        plan: ScalingPlan,
        there: Sequence[ReplicaView],
        actions: Sequence[Action],
    ) -> PoolOutcome:
        wanted, other = plan.pool(name), plan.decode if name == "prefill" else plan.prefill
        counts = [wanted.capacity - 1, wanted.capacity, wanted.capacity + 1]
        fewer, planned, more = self.attainment.expected(name, snapshot, counts)
        return PoolOutcome(
            desired=wanted.desired,
            standby=wanted.standby,
            ready=sum(one.state is ReplicaState.READY for one in there),
            starting=sum(one.state is ReplicaState.STARTING for one in there),
            cause=wanted.cause,
            reason=wanted.reason,
            actions=tuple(text for action in actions if action.pool == name for text in action_texts(action)),
            inputs=inputs_of(name, snapshot),
            target_s=self.attainment.target_s(name),
            planned=planned,
            fewer=fewer if fewer.replicas > 0 else None,
            more=more,
            bill=pool_bill(wanted, there, other if plan.one_price_list else None),
        )


def _filled(decision: ScalingDecision, snapshot: Snapshot) -> ScalingDecision:
    """With what came, by the first snapshot whose window lies after the decision and near it."""
    after_s = snapshot.now_s - decision.at_s
    done = any(pool.achieved is not None for pool in decision.pools.values())
    if done or not decision.window_s <= after_s <= LATE_WINDOWS * decision.window_s:
        return decision
    pools = {
        name: replace(pool, achieved=achieved(name, snapshot, pool.target_s, after_s))
        for name, pool in decision.pools.items()
    }
    return replace(decision, pools=pools)
