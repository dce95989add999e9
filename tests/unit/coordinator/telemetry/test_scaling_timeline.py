"""The timeline keeps decisions that differ, bounded, with texts cut."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.telemetry.scaling_timeline import MAX_ENTRIES, MAX_LATEST, ScalingTimeline, check_decisions
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2, scaling_pb2


def plan(desired: int, reason: str = "busy", **fields: Any) -> scaling_pb2.ApplyPlanRequest:
    pool = fields.pop("pool", registry_pb2.POOL_PREFILL)
    decision = scaling_pb2.PoolDecision(pool=pool, desired=desired, reason=reason, **fields)
    return scaling_pb2.ApplyPlanRequest(decisions=[decision])


def test_a_decision_that_stays_is_one_entry_and_its_reason_follows() -> None:
    timeline = ScalingTimeline()
    timeline.add(plan(2, "0.8 busy", starting=1), 10.0)
    timeline.add(plan(2, "0.9 busy", ready=2), 20.0)
    timeline.add(plan(3, next_actions=["start 1"]), 30.0)
    assert [(one.at_unix_s, one.desired, one.reason) for one in timeline.entries] == [
        (10.0, 2, "0.8 busy"),
        (30.0, 3, "busy"),
    ]
    (latest,) = timeline.latest
    assert (latest.pool, latest.desired, latest.actions) == ("prefill", 3, ("start 1",))


def test_the_latest_decision_keeps_the_time_it_was_first_made() -> None:
    timeline = ScalingTimeline()
    timeline.add(plan(2, "0.8 busy", starting=1), 10.0)
    timeline.add(plan(2, "0.9 busy", ready=2), 20.0)
    (latest,) = timeline.latest
    assert (latest.at_unix_s, latest.ready, latest.reason) == (10.0, 2, "0.9 busy")


def test_models_that_one_autoscaler_scales_are_told_apart() -> None:
    timeline = ScalingTimeline()
    for at_s in (10.0, 20.0):
        for model, desired in (("b", 3), ("a", 2)):
            timeline.add(plan(desired, model=model), at_s)
            timeline.add(plan(desired, model=model, pool=registry_pb2.POOL_DECODE), at_s)
    assert [(one.model, one.pool, one.desired, one.at_unix_s) for one in timeline.latest] == [
        ("a", "prefill", 2, 10.0),
        ("a", "decode", 2, 10.0),
        ("b", "prefill", 3, 10.0),
        ("b", "decode", 3, 10.0),
    ]
    assert len(timeline.entries) == 4, "none is told twice"


def test_whoever_makes_up_models_fills_nothing() -> None:
    timeline = ScalingTimeline()
    for number in range(3 * MAX_LATEST):
        timeline.add(plan(1, model=f"{number}" * 500), float(number))
    assert len(timeline.latest) == MAX_LATEST
    assert max(len(one.model) for one in timeline.latest) == 128


def test_it_is_bounded() -> None:
    timeline = ScalingTimeline()
    for number in range(MAX_ENTRIES + 5):
        timeline.add(plan(number, "x" * 5000, cause="y" * 500, next_actions=["z" * 900] * 40), float(number))
    assert len(timeline.entries) == MAX_ENTRIES
    last = timeline.entries[-1]
    assert last.desired == MAX_ENTRIES + 4
    assert (len(last.reason), len(last.cause), len(last.actions)) == (1024, 64, 16)
    assert {len(text) for text in last.actions} == {200}


def test_wrong_decisions_are_refused() -> None:
    one = plan(1).decisions[0]
    for wrong, field in (
        (scaling_pb2.ApplyPlanRequest(decisions=[one] * 3), "decisions"),
        (plan(1, pool=registry_pb2.POOL_UNSPECIFIED), "decisions.pool"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            check_decisions(wrong)
        assert caught.value.field == field
    check_decisions(plan(1))
    check_decisions(scaling_pb2.ApplyPlanRequest())
