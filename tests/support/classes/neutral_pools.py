"""Neutral workers of several classes for tests: a policy, and workers that start, lean, drain and vanish at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.plan import ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import Lean, ReplicaView
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot
from tests.support.classes.classed_pools import BOUNDS, Clusters, policy, view

SMALL = {"name": "small", "price_per_hour": 1, "max_replicas": 20}
BIG = {"name": "big", "price_per_hour": 3, "max_replicas": 20}
PREFILL = [SMALL, {**BIG, "speed": 5}]
DECODE = [SMALL, {**BIG, "speed": 3.5}]
"""A big one is better at prompts."""


def neutral_policy(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **more: Any
) -> ScalingPolicy:
    """Both pools have these classes."""
    p, d = {"classes": PREFILL, **(prefill or {})}, {"classes": DECODE, **(decode or {})}
    return policy(p, d, workers="neutral", **more)


def worker(name: str, kind: str, state: ReplicaState = ReplicaState.READY, load: float = 0.0) -> ReplicaView:
    """A neutral worker of ours."""
    return replace(view(name, kind, state, load), neutral=True)


class NeutralClusters(Clusters):
    """Whose workers lean where they are asked to at once."""

    def carry_out(self, plan: ScalingPlan) -> tuple[Any, ...]:
        """One decision; the actions."""
        found = reconcile_classes(plan, self.pools, BOUNDS)
        served = [pool for pool in POOLS if self.serving(pool)]
        for action in found:
            if isinstance(action, Lean):
                self._lean(action)
        assert all(self.serving(pool) for pool in served), found
        self.act(tuple(one for one in found if not isinstance(one, Lean)))
        for pool in POOLS:
            self.pools[pool] = [replace(one, neutral=True) for one in self.pools[pool]]
        return found

    def seen(self, load: float, now_s: float) -> Snapshot:
        """As a coordinator sees them."""
        base = super().seen(load, now_s)
        prefill, decode = (
            replace(signals, replicas=tuple(replace(one, neutral=True) for one in signals.replicas))
            for signals in (base.prefill, base.decode)
        )
        rates = {"small": base.prefill.classes["slow"]}
        steps = {"small": base.decode.classes["slow"]}
        return replace(base, prefill=replace(prefill, classes=rates), decode=replace(decode, classes=steps))

    def take_away(self, chances: st.DataObject) -> None:
        """A machine of somebody is lost, or is to be."""
        pool = chances.draw(st.sampled_from(POOLS))
        if self.pools[pool]:
            place = chances.draw(st.integers(0, len(self.pools[pool]) - 1))
            one = self.pools[pool].pop(place)
            if chances.draw(st.booleans()):
                self.pools[pool].append(replace(one, state=ReplicaState.PREEMPTED))

    def all_come_up(self) -> None:
        """What starts is ready, and what drains has ended."""
        for pool in POOLS:
            left = [one for one in self.pools[pool] if one.state is not ReplicaState.DRAINING]
            self.pools[pool] = [
                replace(one, state=ReplicaState.READY) if one.state is ReplicaState.STARTING else one
                for one in left
            ]

    def serving(self, pool: PoolName) -> int:
        """In rotation on one side."""
        return sum(one.state is ReplicaState.READY for one in self.pools[pool])

    def of_class(self, kind: str) -> int:
        """On both sides, but for those that leave."""
        leaving = (ReplicaState.DRAINING, ReplicaState.PREEMPTED)
        there = [one for pool in POOLS for one in self.pools[pool] if one.state not in leaving]
        return sum(one.replica_class == kind for one in there)

    def _lean(self, action: Lean) -> None:
        other: PoolName = "decode" if action.pool == "prefill" else "prefill"
        moved = next(one for one in self.pools[other] if one.name == action.name)
        assert moved.state is ReplicaState.READY
        self.pools[other].remove(moved)
        self.pools[action.pool].append(moved)
