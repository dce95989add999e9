"""The last decisions of the control loop and their reasons: as a page beside the metrics, which `splitserve autoscaler
explain` shows, and as the messages that the coordinators get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from autoscaler.plan import ScalingPlan
from autoscaler.reconcile import Action, ChangeRole, Start, action_word, in_state
from autoscaler.snapshot import Replica, ReplicaState, Snapshot
from splitserve.roles import POOLS, PoolName
from splitserve.rpc.documents import document
from splitserve.v1 import registry_pb2, scaling_pb2

DECISIONS_PATH = "/decisions"
"""The page's path on the metrics port."""
MOST_DECISIONS = 240
MAX_REASON_CHARACTERS = 1024
MAX_ACTIONS, MAX_ACTION_CHARACTERS = 16, 200
_POOLS = {"prefill": registry_pb2.POOL_PREFILL, "decode": registry_pb2.POOL_DECODE}


@dataclass(slots=True)
class DecisionJournal:
    """Written by the control loop. `decisions`, oldest first, is replaced as a whole, so any thread may read it."""

    decisions: tuple[Mapping[str, Any], ...] = ()
    """JSON objects, as the page shows them."""
    _count: int = 0
    """Decisions since the process started."""

    def enter(self, snapshot: Snapshot, decided: Sequence[scaling_pb2.PoolDecision], acted: bool) -> None:
        """Keeps a decision; `decided` has its pools in order of POOLS. `acted` is False in a dry run, and while another
        autoscaler holds the lease."""
        self._count += 1
        pools = zip(POOLS, decided, strict=True)
        decision = {
            "number": self._count,
            "time": datetime.fromtimestamp(snapshot.wall_s, UTC).isoformat(timespec="milliseconds"),
            "acted": acted,
            "complete": snapshot.complete,
            "pools": {
                name: document(of_pool) | {"inputs": inputs_of(name, snapshot)} for name, of_pool in pools
            },
        }
        self.decisions = (*self.decisions, decision)[-MOST_DECISIONS:]

    def document(self) -> dict[str, Any]:
        """The page: the latest decision first."""
        return {"decisions": list(reversed(self.decisions))}


def inputs_of(name: PoolName, snapshot: Snapshot) -> dict[str, float | None]:
    """The signals that decided a pool's count; rates over the snapshot's window. None: not measured."""
    recent = snapshot.arrivals_of_last(snapshot.window_s)
    length_s = sum(bucket.length_s for bucket in recent)

    def per_s(amounts: Iterable[float]) -> float | None:
        return sum(amounts) / length_s if length_s > 0 else None

    if name == "prefill":
        prefill, latency = snapshot.prefill, snapshot.prefill.latency
        return {
            "requests_per_s": per_s(bucket.requests for bucket in recent),
            "uncached_tokens_per_s": per_s(bucket.uncached_tokens for bucket in recent),
            "backlog_tokens": float(prefill.backlog_tokens),
            "replica_tokens_per_s": prefill.tokens_per_s,
            "latency_p95_s": latency.percentile(95) if latency else None,
            "cold_start_s": prefill.cold_start_s,
        }
    decode, tpot = snapshot.decode, snapshot.decode.tpot
    return {
        "output_tokens_per_s": per_s(bucket.output_tokens for bucket in recent),
        "running_requests": float(decode.running_requests),
        "waiting_reservations": float(decode.waiting_reservations),
        "context_tokens": float(decode.context_tokens),
        "replica_kv_tokens": decode.kv_capacity_tokens,
        "tpot_p95_s": tpot.percentile(95) if tpot else None,
        "cold_start_s": decode.cold_start_s,
    }


def decisions_of(
    plan: ScalingPlan, pools: Mapping[PoolName, Sequence[Replica]], actions: Sequence[Action]
) -> list[scaling_pb2.PoolDecision]:
    """One entry a pool: counts, reason, and the actions that follow from comparing the plan with its replicas."""
    return [_decision(plan, pool, pools[pool], actions) for pool in POOLS]


def _decision(
    plan: ScalingPlan, pool: PoolName, replicas: Sequence[Replica], actions: Sequence[Action]
) -> scaling_pb2.PoolDecision:
    wanted = plan.pool(pool)
    texts = [text for action in actions if action.pool == pool for text in action_texts(action)]
    return scaling_pb2.PoolDecision(
        pool=_POOLS[pool],
        desired=wanted.desired,
        standby=wanted.standby,
        ready=len(in_state(replicas, ReplicaState.READY)),
        starting=len(in_state(replicas, ReplicaState.STARTING)),
        cause=wanted.cause,
        reason=wanted.reason[:MAX_REASON_CHARACTERS],
        next_actions=[text[:MAX_ACTION_CHARACTERS] for text in texts[:MAX_ACTIONS]],
    )


def action_texts(action: Action) -> list[str]:
    """An action for people: "start 2", "drain decode-3"; one text a replica."""
    match action:
        case Start(count=count):
            return [f"start {count}"]
        case ChangeRole(name=name):
            return [f"give {name} this pool's role, which takes no cold start"]
    return [f"{action_word(action)} {name}" for name in action.names]
