"""Pools with classes for tests: a policy, snapshots, and replicas that start and drain for random times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from autoscaler.decide import make_decide
from autoscaler.plan import ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Activate, Bounds, Drain, ReplicaView, Rest, Start
from autoscaler.snapshot import POOLS, ClassSignals, PoolName, Replica, ReplicaState, Snapshot
from tests.support.scaling.snapshots import Load, snapshot

READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING
SLOW = {"name": "slow", "price_per_hour": 1, "max_replicas": 20}
FAST = {"name": "fast", "price_per_hour": 3, "speed": 4, "max_replicas": 20}
BOUNDS: dict[PoolName, Bounds] = {"prefill": Bounds(1, 20), "decode": Bounds(1, 20)}


def policy(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **more: Any
) -> ScalingPolicy:
    both = {"min_replicas": 1, "max_replicas": 40, "classes": [SLOW, FAST]}
    return parse_policy(
        {
            "prefill": {"target_ms": 1000, **both, **(prefill or {})},
            "decode": {"target_ms": 60, **both, **(decode or {})},
            **more,
        }
    )


def classed(given: Snapshot, prefill: str = "slow", decode: str = "slow") -> Snapshot:
    """The snapshot with all replicas of these classes, as fast as `Snapshot` says for a slow one."""

    def named(replicas: tuple[Replica, ...], kind: str) -> tuple[Replica, ...]:
        return tuple(replace(one, replica_class=kind) for one in replicas)

    p, d = given.prefill, given.decode
    return replace(
        given,
        prefill=replace(
            p, replicas=named(p.replicas, prefill), classes={"slow": ClassSignals(1, p.tokens_per_s)}
        ),
        decode=replace(
            d,
            replicas=named(d.replicas, decode),
            classes={"slow": ClassSignals(1, None, d.kv_capacity_tokens, d.max_running_requests, d.step)},
        ),
    )


def decided(rules: ScalingPolicy, given: Snapshot) -> ScalingPlan:
    return make_decide(rules)(None, given)[0]


def counts(plan: ScalingPlan, pool: PoolName = "prefill") -> dict[str, int]:
    return {share.name: share.count for share in plan.pool(pool).mix}


def view(name: str, kind: str, state: ReplicaState = READY, load: float = 0.0) -> ReplicaView:
    return ReplicaView(name, state, load, 0.0, replica_class=kind)


class Clusters:
    """Replicas that start and drain for random times, under decisions of a policy."""

    def __init__(self) -> None:
        self.pools: dict[PoolName, list[ReplicaView]] = {"prefill": [], "decode": []}
        self.number = 0

    def seen(self, load: float, now_s: float) -> Snapshot:
        base = snapshot(now_s, load=Load(load))
        parts: dict[str, Any] = {}
        for pool in POOLS:
            there = tuple(
                Replica(one.name, one.state, 0.0, replica_class=one.replica_class) for one in self.pools[pool]
            )
            parts[pool] = replace(base.pool(pool), replicas=there)
        rated = classed(base)
        return replace(
            base,
            prefill=replace(parts["prefill"], classes=rated.prefill.classes),
            decode=replace(parts["decode"], classes=rated.decode.classes),
        )

    def act(self, found: tuple[Any, ...]) -> None:
        for action in found:
            there = self.pools[action.pool]
            match action:
                case Start(pool, count, kind):
                    for _ in range(count):
                        self.number += 1
                        there.append(view(f"{pool}-{self.number}", kind, STARTING))
                case Activate(_, name) | Rest(_, name):
                    state = READY if isinstance(action, Activate) else ReplicaState.STANDBY
                    for place, one in enumerate(there):
                        if one.name == name:
                            there[place] = replace(one, state=state)
                case Drain(_, names):
                    for place, one in enumerate(there):
                        if one.name in names:
                            there[place] = replace(one, state=DRAINING)

    def pass_time(self, chances: st.DataObject) -> None:
        for pool in POOLS:
            after = []
            for one in self.pools[pool]:
                state = one.state
                if state is STARTING and chances.draw(st.booleans()):
                    after.append(replace(one, state=READY))
                elif not (state is DRAINING and chances.draw(st.booleans())):
                    after.append(one)
            self.pools[pool] = after
