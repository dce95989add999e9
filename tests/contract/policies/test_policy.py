"""What every kind of scaling policy must keep, whatever it wants. A new kind needs an entry in `POOLS`."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

from autoscaler.decide import make_decide
from autoscaler.plan import Decide, ScalingPlan
from autoscaler.policies.policy_file import AnyPool, parse_policy
from autoscaler.snapshot import Snapshot
from tests.support.scaling.snapshots import Load, arrivals, snapshot

LEAST, MOST = 2, 6
POOLS: dict[str, dict[str, Any]] = {
    "slo": {"target_ms": 1000},
    "target": {"metric": "queue_depth", "target": 10},
    "schedule": {"schedule": [{"start": "00:00", "end": "12:00", "replicas": 3}]},
    "predictive": {"target_ms": 1000},
    "custom": {"function": "tests.support.scaling.custom_policy:by_queue"},
}
LOADS = (Load(requests_per_s=0.0), Load(), Load(requests_per_s=500.0), Load(bursts=((1700.0, 2040.0, 40.0),)))
METRICS: tuple[dict[str, float], ...] = ({}, {"queue_depth": 0.0}, {"queue_depth": 1e6})

kinds = pytest.mark.parametrize("kind", list(POOLS))


def policy_of(kind: str, **common: Any) -> Decide:
    pool = {"kind": kind, "min_replicas": LEAST, "max_replicas": MOST, **POOLS[kind], **common}
    return make_decide(parse_policy({"prefill": pool, "decode": pool}))


@cache
def decisions(kind: str, replicas_at_all_times: int = 0) -> list[tuple[Snapshot, ScalingPlan]]:
    """Four minutes in which the load changes every half minute, decided every ten seconds."""
    common = {}
    if replicas_at_all_times:
        common["schedule"] = [{"start": "00:00", "end": "00:00", "replicas": replicas_at_all_times}]
    decide, memory, seen = policy_of(kind, **common), None, []
    for tick in range(24):
        now_s, phase = 1800.0 + 10 * tick, tick // 3
        load = LOADS[phase % len(LOADS)]
        given = snapshot(now_s, prefill=4, decode=4, metrics=METRICS[phase % len(METRICS)])
        given = replace(given, arrivals=arrivals(load, now_s, since_s=now_s - 600.0, length_s=10.0))
        plan, memory = decide(memory, given)
        seen.append((given, plan))
    return seen


def test_every_kind_is_tested() -> None:
    members = get_args(get_args(AnyPool)[0])
    assert {get_args(get_args(each)[0].model_fields["kind"].annotation)[0] for each in members} == set(POOLS)


@kinds
def test_replicas_stay_within_the_bounds(kind: str) -> None:
    for _, plan in decisions(kind):
        assert LEAST <= plan.prefill.desired <= MOST
        assert LEAST <= plan.decode.desired <= MOST


@kinds
def test_a_decision_depends_on_memory_and_snapshot_alone(kind: str) -> None:
    decide, memory = policy_of(kind), None
    for given, plan in decisions(kind):
        before = copy.deepcopy(memory)
        again, _ = decide(before, given)
        found, memory = decide(memory, given)
        assert found == again == plan


@kinds
def test_every_decision_says_why(kind: str) -> None:
    assert all(plan.prefill.reason and plan.decode.reason for _, plan in decisions(kind))


@kinds
def test_a_missing_coordinator_never_scales_down(kind: str) -> None:
    decide, memory, wanted = policy_of(kind), None, None
    for tick in range(12):
        now_s = 1800.0 + 60 * tick
        given = snapshot(now_s, prefill=5, decode=5, complete=False)
        given = replace(given, arrivals=arrivals(LOADS[0], now_s, since_s=now_s - 600.0, length_s=10.0))
        plan, memory = decide(memory, given)
        assert wanted is None or plan.prefill.desired >= wanted[0]
        assert wanted is None or plan.decode.desired >= wanted[1]
        wanted = plan.prefill.desired, plan.decode.desired
    assert wanted is not None
    assert min(wanted) >= 5


@kinds
def test_the_gpu_budget_is_kept(kind: str) -> None:
    pool = {"kind": kind, "min_replicas": 1, "max_replicas": MOST, **POOLS[kind]}
    decide = make_decide(parse_policy({"prefill": pool, "decode": pool, "gpu_budget": 5}))
    memory = None
    for given, _ in decisions(kind):
        plan, memory = decide(memory, given)
        assert plan.prefill.desired + plan.decode.desired <= 5


@kinds
def test_a_window_of_the_schedule_lifts_it(kind: str) -> None:
    assert all(plan.prefill.desired >= 5 for _, plan in decisions(kind, replicas_at_all_times=5))
