"""From and to zero: when pools are given up, and what starts them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.decide import make_decide
from autoscaler.plan import Memory, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.snapshot import ArrivalBucket, DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot

IDLE_S = 60.0
KINDS: dict[str, dict[str, Any]] = {
    "slo": {"target_ms": 1000},
    "target": {"metric": "queue_depth", "target": 10},
    "schedule": {},
    "predictive": {"target_ms": 1000},
    "custom": {"function": "tests.support.scaling.custom_policy:by_queue"},
}
NEVER_DOWN = {"scaleDown": {"stabilizationWindowSeconds": 3600}}


class Pools:
    """Decides again and again; what it wanted is there at the next moment."""

    def __init__(self, kind: str = "slo", pool: dict[str, Any] | None = None, **policy: Any) -> None:
        each = {"kind": kind, "min_replicas": 0, "max_replicas": 4, **KINDS[kind], **(pool or {})}
        rules = {"prefill": each, "decode": each, "idle_s": IDLE_S, **policy}
        self.decide = make_decide(parse_policy(rules))
        self.memory: Memory = None
        self.now_s = 1000.0
        self.there = {"prefill": ReplicaState.READY, "decode": ReplicaState.READY}
        self.counts = {"prefill": 1, "decode": 1}
        self.plan: ScalingPlan | None = None

    def look(self, after_s: float = 5.0, **changes: Any) -> tuple[int, int]:
        self.now_s += after_s
        self.plan, self.memory = self.decide(self.memory, replace(self.snapshot(), **changes))
        self.counts = {"prefill": self.plan.prefill.desired, "decode": self.plan.decode.desired}
        return self.plan.prefill.desired, self.plan.decode.desired

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.now_s,
            PrefillSignals(self._replicas("prefill")),
            DecodeSignals(self._replicas("decode")),
            wall_s=self.now_s,
        )

    def _replicas(self, pool: str) -> tuple[Replica, ...]:
        return tuple(
            Replica(f"{pool}-{n}", self.there[pool], self.now_s - 100) for n in range(self.counts[pool])
        )

    def to_zero(self) -> None:
        self.look()
        assert self.look(IDLE_S) == (0, 0)


def bucket(start_s: float, requests: int) -> ArrivalBucket:
    return ArrivalBucket(start_s, 5.0, requests, 10 * requests, 10 * requests, 10.0 * requests)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_goes_to_zero_when_idle_and_comes_back_for_the_first_request(kind: str) -> None:
    pools = Pools(kind, {"behavior": NEVER_DOWN})
    assert pools.look(in_progress=1) == (1, 1)
    assert pools.look(IDLE_S - 1) == (1, 1)
    assert pools.look(1.0) == (0, 0), "not slowed down by its behavior"
    assert pools.plan is not None
    assert (pools.plan.prefill.cause, pools.plan.prefill.reason) == (
        "to_zero",
        f"to zero: idle for {IDLE_S:.0f} s",
    )
    assert pools.look() == (0, 0)
    assert pools.plan.decode.reason == f"at zero: idle for {IDLE_S + 5:.0f} s"
    assert pools.look(waiting_for_workers=3, in_progress=3) == (1, 1)
    assert pools.plan.prefill.cause == pools.plan.decode.cause == "from_zero"
    assert pools.plan.decode.reason.startswith("from zero: 3 requests wait")
    pools.there = dict.fromkeys(pools.there, ReplicaState.STARTING)
    assert pools.look(waiting_for_workers=4, in_progress=4) == (1, 1)
    assert pools.plan.prefill.reason.startswith("from zero: 4 requests wait")
    pools.there = dict.fromkeys(pools.there, ReplicaState.READY)
    assert pools.look(in_progress=4) == (1, 1)
    assert "from zero" not in pools.plan.prefill.reason
    assert pools.look(IDLE_S - 1) == (1, 1)
    assert pools.look(1.0) == (0, 0)


def test_what_came_and_went_between_two_looks_keeps_them() -> None:
    pools = Pools()
    pools.look()
    for _ in range(30):
        assert pools.look(5.0, arrivals=(bucket(pools.now_s, 1),)) == (1, 1)


def test_nothing_is_given_up_while_a_coordinator_is_silent_or_nobody_knows_the_model() -> None:
    pools = Pools()
    pools.look()
    assert pools.look(10 * IDLE_S, complete=False) == (1, 1)
    assert pools.look(10 * IDLE_S, model_known=False) == (1, 1)
    assert pools.look() == (0, 0)


def test_what_still_runs_on_draining_replicas_starts_nothing() -> None:
    pools = Pools()
    pools.to_zero()
    pools.there = dict.fromkeys(pools.there, ReplicaState.DRAINING)
    pools.counts = {"prefill": 1, "decode": 1}
    assert pools.look(in_progress=1, arrivals=(bucket(pools.now_s, 1),)) == (0, 0)
    assert pools.look(in_progress=1, waiting_for_workers=1) == (1, 1)


def test_who_leaves_while_replicas_start_leaves_them_for_the_idle_time() -> None:
    pools = Pools()
    pools.to_zero()
    assert pools.look(waiting_for_workers=1, in_progress=1) == (1, 1)
    pools.there = dict.fromkeys(pools.there, ReplicaState.STARTING)
    assert pools.look(IDLE_S - 1) == (1, 1), "the next one may come"
    assert pools.look(6.0) == (0, 0)
    assert pools.plan is not None
    assert pools.plan.prefill.given_up
    assert pools.plan.decode.given_up, "what still starts ends"


def test_what_was_not_given_up_after_all_is_used() -> None:
    """In a dry run, whose plans nobody carries out, and where a coordinator could not be told."""
    pools = Pools()
    pools.look(acting=False)
    assert pools.look(IDLE_S, acting=False) == (0, 0)
    pools.counts = {"prefill": 2, "decode": 1}
    assert pools.look(acting=False) == (0, 0)
    pools.counts = {"prefill": 2, "decode": 1}
    assert pools.look(acting=False, in_progress=1)[1] == 1


def test_a_restarted_autoscaler_leaves_zero_and_what_runs_as_they_are() -> None:
    at_zero = Pools()
    at_zero.counts = {"prefill": 0, "decode": 0}
    assert at_zero.look() == (0, 0)
    running = Pools()
    assert running.look() == (1, 1)
    assert running.look(IDLE_S - 1) == (1, 1)


def test_one_that_nobody_has_seen_yet_is_started_once() -> None:
    pools = Pools()
    pools.counts = {"prefill": 0, "decode": 0}
    assert pools.look(model_known=False) == (1, 1)
    assert pools.plan is not None
    assert "no coordinator knows the model" in pools.plan.prefill.reason
    pools.to_zero()


def test_a_window_of_the_schedule_starts_and_keeps_them() -> None:
    day = [{"start": "00:00", "end": "12:00", "replicas": 2}]
    pools = Pools(pool={"schedule": day})
    pools.counts = {"prefill": 0, "decode": 0}
    assert pools.look() == (2, 2), "the epoch began at midnight"
    pools.there = dict.fromkeys(pools.there, ReplicaState.READY)
    assert pools.look(10 * IDLE_S) == (2, 2)
    assert pools.look(12 * 3600.0) == (0, 0)


def test_a_pool_may_stay_while_the_other_goes() -> None:
    each = {"kind": "schedule", "max_replicas": 4}
    rules = {"prefill": each | {"min_replicas": 0}, "decode": each | {"min_replicas": 2}, "idle_s": IDLE_S}
    pools = Pools()
    pools.decide, pools.counts = make_decide(parse_policy(rules)), {"prefill": 1, "decode": 2}
    assert pools.look() == (1, 2)
    assert pools.look(IDLE_S) == (0, 2)
    assert pools.look(in_progress=1) == (0, 2), "it is served by what still drains"
    assert pools.look(waiting_for_workers=1) == (1, 2)


def test_standbys_stay_loaded() -> None:
    pools = Pools(pool={"warm_standby": 1})
    pools.to_zero()
    assert pools.plan is not None
    assert (pools.plan.prefill.standby, pools.plan.decode.standby) == (1, 1)


def test_the_gpu_budget_must_hold_what_can_serve() -> None:
    pools = Pools(gpu_budget=2)
    pools.counts = {"prefill": 0, "decode": 0}
    pools.look()
    wanted = pools.look(waiting_for_workers=500)
    assert sum(wanted) == 2
    with pytest.raises(Exception, match="gpu_budget"):
        Pools(gpu_budget=1)


@pytest.mark.parametrize(
    ("replicas", "standbys", "due_in_s", "awake"),
    [(1, 0, 50.0, True), (1, 1, 50.0, False), (1, 1, 4.0, True), (2, 1, 50.0, True)],
    ids=["cold", "on standby", "due", "another one is cold"],
)
def test_a_window_s_first_replicas_start_as_early_as_they_take(
    replicas: int, standbys: int, due_in_s: float, awake: bool
) -> None:
    """Windows begin at midnight, UTC; a cold start takes 60 s, and decisions are made every 5 s."""
    window = {"start": "00:00", "end": "01:00", "replicas": replicas}
    pools = Pools(pool={"warm_standby": standbys, "schedule": [window]})
    pools.counts = {"prefill": standbys, "decode": standbys}
    pools.there = {"prefill": ReplicaState.STANDBY, "decode": ReplicaState.STANDBY}
    midnight = 20_000 * 86_400.0
    snapshot = replace(pools.snapshot(), wall_s=midnight - due_in_s)
    plan, _ = pools.decide(None, snapshot)
    assert (plan.prefill.desired > 0) is awake
