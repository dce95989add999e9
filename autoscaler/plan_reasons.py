"""What the autoscaler tells the coordinators about its decisions, for people to see. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoscaler.plan import ScalingPlan
from autoscaler.reconcile import Action, Activate, Drain, Lean, ReplicaView, Rest, Start
from autoscaler.snapshot import POOLS, PoolName, ReplicaState
from splitserve.v1 import registry_pb2, scaling_pb2

MAX_REASON_CHARACTERS = 1024
MAX_ACTIONS, MAX_ACTION_CHARACTERS = 16, 200
_POOLS = {"prefill": registry_pb2.POOL_PREFILL, "decode": registry_pb2.POOL_DECODE}


def decisions_of(
    plan: ScalingPlan, pools: Mapping[PoolName, Sequence[ReplicaView]], actions: Sequence[Action]
) -> list[scaling_pb2.PoolDecision]:
    """One entry a pool: counts, reason, and the actions that follow from comparing the plan with its replicas."""
    return [_decision(plan, pool, pools[pool], actions) for pool in POOLS]


def _decision(
    plan: ScalingPlan, pool: PoolName, there: Sequence[ReplicaView], actions: Sequence[Action]
) -> scaling_pb2.PoolDecision:
    wanted = plan.pool(pool)
    texts = [text for action in actions if action.pool == pool for text in action_texts(action)]
    return scaling_pb2.PoolDecision(
        pool=_POOLS[pool],
        desired=wanted.desired,
        standby=wanted.standby,
        ready=sum(one.state is ReplicaState.READY for one in there),
        starting=sum(one.state is ReplicaState.STARTING for one in there),
        cause=wanted.cause,
        reason=wanted.reason[:MAX_REASON_CHARACTERS],
        next_actions=[text[:MAX_ACTION_CHARACTERS] for text in texts[:MAX_ACTIONS]],
    )


def action_texts(action: Action) -> list[str]:
    """An action for people: "start 2", "drain decode-3"; one text a replica."""
    match action:
        case Start(count=count, replica_class=kind):
            return [f"start {count} {kind}".rstrip()]
        case Drain(names=names):
            return [f"drain {name}" for name in names]
        case Activate(name=name):
            return [f"activate {name}"]
        case Rest(name=name):
            return [f"rest {name}"]
        case Lean(name=name):
            return [f"let {name} lean here, which takes no cold start"]
