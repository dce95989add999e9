"""`behavior` follows what Kubernetes documents for an HPA."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.policies.behavior import Behavior, BehaviorMemory, Limits, follow, record_change

HPA = Limits()


def limits(**directions: object) -> Limits:
    return Limits.of(Behavior.model_validate(directions))


def run(
    rules: Limits, wanted: list[tuple[float, int]], start: int, low: int = 1, high: int = 1000
) -> list[int]:
    memory, current, seen = BehaviorMemory(), start, []
    for now, want in wanted:
        new, memory = follow(rules, memory, now, current, want, low, high)
        memory = record_change(rules, memory, now, new - current)
        current = new
        seen.append(current)
    return seen


def test_defaults_are_those_of_an_hpa() -> None:
    assert HPA.up.window_s == 0
    assert HPA.down.window_s == 300
    assert [(p.type, p.value, p.periodSeconds) for p in HPA.up.policies] == [
        ("Percent", 100, 15),
        ("Pods", 4, 15),
    ]
    assert [(p.type, p.value, p.periodSeconds) for p in HPA.down.policies] == [("Percent", 100, 15)]
    assert (HPA.up.select, HPA.down.select, HPA.up.tolerance) == ("Max", "Max", 0.1)


@pytest.mark.parametrize(("current", "allowed"), [(1, 5), (3, 7), (4, 8), (10, 20)])
def test_growing_by_four_or_doubling_in_fifteen_seconds(current: int, allowed: int) -> None:
    assert run(HPA, [(0, 100), (14, 100), (15.5, 100)], current) == [
        allowed,
        allowed,
        max(2 * allowed, allowed + 4),
    ]


def test_the_highest_recommendation_of_the_window_holds_a_pool_up() -> None:
    assert run(HPA, [(0, 8), (100, 3), (299, 3), (301, 3)], 8) == [8, 8, 8, 3]


def test_the_lowest_recommendation_of_the_window_holds_growth_back() -> None:
    rules = limits(scaleUp={"stabilizationWindowSeconds": 60})
    assert run(rules, [(0, 2), (10, 9), (59, 7), (61, 6)], 2) == [2, 2, 2, 6]


def test_the_documented_limit_of_scaling_down() -> None:
    # 80 replicas, at most 10% or 4 pods a minute, whichever is more: 80 to 72, then 10% of 72 rounds to 64.
    rules = limits(
        scaleDown={
            "stabilizationWindowSeconds": 0,
            "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": 60},
                {"type": "Percent", "value": 10, "periodSeconds": 60},
            ],
        }
    )
    assert run(rules, [(0, 10), (30, 10), (61, 10)], 80) == [72, 72, 64]


@pytest.mark.parametrize(("select", "result"), [("Max", 20), ("Min", 12), ("Disabled", 10)])
def test_select_policy(select: str, result: int) -> None:
    rules = limits(
        scaleUp={
            "selectPolicy": select,
            "policies": [
                {"type": "Pods", "value": 2, "periodSeconds": 60},
                {"type": "Percent", "value": 100, "periodSeconds": 60},
            ],
        }
    )
    assert run(rules, [(0, 50)], 10) == [result]


def test_disabled_in_one_direction_leaves_the_other_alone() -> None:
    rules = limits(scaleDown={"selectPolicy": "Disabled"})
    assert run(rules, [(0, 1), (1000, 1), (2000, 9)], 5) == [5, 5, 9]


def test_what_was_removed_in_a_period_may_come_back() -> None:
    # Growth is counted from the period's start, when there were still 10.
    rules = limits(
        scaleUp={"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]},
        scaleDown={"stabilizationWindowSeconds": 0},
    )
    assert run(rules, [(0, 5), (10, 50)], 10) == [5, 11]


COUNTS = st.integers(1, 200)
WANTED = st.lists(st.tuples(st.floats(0.1, 400), COUNTS), min_size=1, max_size=30)


@settings(max_examples=30, deadline=None)
@given(WANTED, COUNTS)
def test_the_count_never_leaves_what_was_asked_for(steps: list[tuple[float, int]], start: int) -> None:
    now, timeline = 0.0, []
    for pause, want in steps:
        now += pause
        timeline.append((now, want))
    asked = [start, *(want for _, want in timeline)]
    for index, count in enumerate(run(HPA, timeline, start)):
        assert min(asked[: index + 2]) <= count <= max(asked[: index + 2])


@settings(max_examples=30, deadline=None)
@given(WANTED, COUNTS, st.integers(1, 20), st.integers(20, 60))
def test_bounds_and_rates_hold(steps: list[tuple[float, int]], start: int, low: int, high: int) -> None:
    now, timeline = 0.0, []
    for pause, want in steps:
        now += pause
        timeline.append((now, want))
    begin = min(max(start, low), high)
    counts = run(HPA, timeline, begin, low, high)
    for index, count in enumerate(counts):
        assert low <= count <= high
        at = timeline[index][0]
        recent = [begin if i == 0 else counts[i - 1] for i in range(index + 1) if timeline[i][0] > at - 15]
        assert count <= max(2 * max(recent), max(recent) + 4)


@settings(max_examples=30, deadline=None)
@given(WANTED, COUNTS)
def test_no_shrinking_below_the_window_maximum(steps: list[tuple[float, int]], start: int) -> None:
    now, timeline = 0.0, []
    for pause, want in steps:
        now += pause
        timeline.append((now, want))
    before = start
    for index, count in enumerate(run(HPA, timeline, start)):
        at = timeline[index][0]
        if count < before:
            assert count >= max(want for when, want in timeline[: index + 1] if when > at - 300)
        before = count
