"""What of an autoscaler's plan is binding for a coordinator's planner, and what it may move meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.leanings.leaning_planner import RETURN_AFTER_S, LeaningMemory, plan_leanings
from coordinator.leanings.pressure import Pressure, WorkerWork
from coordinator.workers.rotation import checked_plan
from coordinator.workers.snapshot import PoolName
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import scaling_pb2
from tests.unit.coordinator.leanings.test_leaning_loop import DECODE, PREFILL, Site, site

TOKENS, PROMPTS = Pressure(0.5, 2.0), Pressure(2.0, 0.5)


def plan(here: Site, prefill: list[str], decode: list[str], movable: list[str]) -> None:
    request = scaling_pb2.ApplyPlanRequest(
        prefill_leaning_worker_ids=prefill, decode_leaning_worker_ids=decode, movable_worker_ids=movable
    )
    here.registry.apply_plan(checked_plan(request, 0.0))


def looked(here: Site, seconds: range = range(3)) -> list[str]:
    for second in seconds:
        here.loop.look(float(second))
    return here.asked()


def test_of_workers_that_a_plan_names_only_those_that_it_leaves_are_moved() -> None:
    here = site("a")
    plan(here, ["a.0", "a.1"], ["a.2"], ["a.1"])
    assert looked(here) == ["a.1"]


def test_one_that_has_come_since_the_plan_is_bound() -> None:
    here = site("a")
    plan(here, ["a.0"], ["a.2"], ["a.2"])
    assert looked(here) == []


def test_a_movable_one_is_not_asked_back_to_where_the_plan_saw_it() -> None:
    here = site("a")
    here.hear("a.1", DECODE)
    plan(here, ["a.0", "a.1"], ["a.2"], ["a.1"])
    assert here.asked() == []
    plan(here, ["a.0", "a.1"], ["a.2"], [])
    assert here.asked() == ["a.1"], "bound"


def test_nobody_is_moved_while_an_order_of_the_plan_has_not_been_followed() -> None:
    here = site("a")
    here.take("a.3", DECODE)
    for _ in range(2):
        for name, pool in (("a.0", PREFILL), ("a.1", PREFILL), ("a.2", DECODE), ("a.3", DECODE)):
            here.hear(name, pool)
    plan(here, ["a.0", "a.1", "a.2"], ["a.3"], ["a.0", "a.1"])
    assert looked(here) == ["a.2"]
    here.hear("a.2", PREFILL)
    assert looked(here, range(3, 32)) == [], "nor back, for a while"
    assert looked(here, range(32, 36)) == ["a.0"]


def test_what_the_planner_has_asked_is_dropped_once_a_plan_binds_the_worker() -> None:
    here = site("a")
    plan(here, ["a.0", "a.1"], ["a.2"], ["a.1"])
    assert looked(here) == ["a.1"]
    plan(here, ["a.0", "a.1"], ["a.2"], ["a.0"])
    assert here.asked() == []
    here.loop.look(3.0)
    assert here.asked() == []


def test_a_plan_made_before_a_move_was_seen_takes_the_last_one_from_no_side() -> None:
    here = site("a")
    plan(here, ["a.0", "a.1"], ["a.2"], ["a.1"])
    assert looked(here) == ["a.1"]
    plan(here, ["a.1"], ["a.0", "a.2"], ["a.1"])
    assert here.asked() == ["a.1"], "on its way: then a.0 is the last one"
    here.hear("a.1", DECODE)
    assert here.asked() == []
    plan(here, ["a.1"], ["a.0", "a.2"], [])
    assert here.asked() == ["a.0", "a.1"], "a plan that binds all is followed to the letter"


def test_only_named_ones_can_be_movable() -> None:
    with pytest.raises(InvalidArgumentError, match="'x'") as caught:
        checked_plan(scaling_pb2.ApplyPlanRequest(movable_worker_ids=["x"]), 0.0)
    assert caught.value.field == "movable_worker_ids"


def work(name: str, pool: PoolName) -> WorkerWork:
    return WorkerWork((name, 1), pool, True, 0.0, 0, 0)


def test_for_30_s_nobody_goes_against_a_plan_and_without_one_anybody_may() -> None:
    before = [work("a", "prefill"), work("b", "prefill"), work("c", "decode"), work("d", "decode")]
    after = [*before[:2], replace(before[2], pool="prefill"), before[3]]
    for movable, first_s in (({("a", 1), ("b", 1)}, RETURN_AFTER_S), (None, 5.0)):
        memory = plan_leanings(LeaningMemory(), before, TOKENS, -1.0, movable)
        second = 0
        while memory.order is None:
            memory = plan_leanings(memory, after, TOKENS, float(second), movable)
            second += 1
        assert second - 1 == first_s
    same_way = plan_leanings(LeaningMemory(), before, PROMPTS, -1.0, {("d", 1)})
    for second in range(6):
        same_way = plan_leanings(same_way, [*after, work("e", "decode")], PROMPTS, float(second), {("d", 1)})
    assert same_way.order is not None
