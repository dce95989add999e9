"""Policies of kind `target` do what an HPA does with the same metric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.snapshot import Snapshot
from splitserve.histograms import Histogram
from tests.support.scaling.snapshots import Load, replicas, snapshot


def policy(**decode: Any) -> ScalingPolicy:
    block = {"kind": "target", "metric": "queue", "target": 10, "max_replicas": 50, **decode}
    return parse_policy({"prefill": {"kind": "schedule"}, "decode": block})


def wanted(rules: ScalingPolicy, seen: Snapshot) -> int:
    return make_decide(rules)(None, seen)[0].decode.desired


@pytest.mark.parametrize(
    ("value", "result"), [(10.0, 4), (10.9, 4), (11.1, 5), (15.0, 6), (20.0, 8), (9.1, 4), (None, 4)]
)
def test_ceil_of_ready_times_ratio_outside_the_tolerance(value: float | None, result: int) -> None:
    assert wanted(policy(), snapshot(decode=4, metrics={"queue": value})) == result


def test_shrinking_waits_for_the_window() -> None:
    decide, memory, counts = make_decide(policy()), None, []
    for now in (0.0, 299.0, 301.0):
        plan, memory = decide(memory, snapshot(now, decode=8, metrics={"queue": 5.0}))
        counts.append(plan.decode.desired)
    assert counts == [8, 8, 4]


def test_average_value_divides_by_replicas() -> None:
    assert wanted(policy(target_type="AverageValue"), snapshot(decode=4, metrics={"queue": 75.0})) == 8
    assert wanted(policy(target_type="AverageValue"), snapshot(decode=4, metrics={"queue": 42.0})) == 4


def test_the_ratio_is_of_ready_replicas_so_that_starting_ones_are_not_multiplied() -> None:
    seen = snapshot(decode=4, metrics={"queue": 15.0})
    seen = replace(seen, decode=replace(seen.decode, replicas=replicas("d", 4, starting=2)))
    assert wanted(policy(), seen) == 6


def test_a_tolerance_of_its_own() -> None:
    rules = policy(behavior={"scaleUp": {"tolerance": 0.6}})
    assert wanted(rules, snapshot(decode=4, metrics={"queue": 15.0})) == 4


def test_built_in_metrics() -> None:
    seen = snapshot(decode=4, tpot_s=0.1, load=Load(requests_per_s=20))
    assert wanted(policy(metric="tpot", target=50), seen) == 8
    seen = replace(seen, prefill=replace(seen.prefill, backlog_tokens=6000, ttft=Histogram.of([2.0] * 9)))
    assert wanted(policy(metric="backlog_tokens", target=4000), seen) == 6
    assert wanted(policy(metric="ttft", target=1000), seen) == 8
    held = replace(seen, decode=replace(seen.decode, context_tokens=640_000))
    assert wanted(policy(metric="utilization", target=0.4), held) == 8
    prefill = parse_policy(
        {
            "prefill": {"kind": "target", "metric": "utilization", "target": 0.5},
            "decode": {"kind": "schedule"},
        }
    )
    assert make_decide(prefill)(None, seen)[0].prefill.desired == 8


def test_a_target_next_to_nothing_grows_as_fast_as_may_be() -> None:
    assert wanted(policy(target=1e-308), snapshot(decode=4, metrics={"queue": 5.0})) == 8
