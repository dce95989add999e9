"""What an autoscaler makes of moves that it has not ordered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.leanings.turn_watch import LEAST_S, TOLD_S, TurnWatch
from autoscaler.leanings.turned_capacity import TurnedCapacity, turned_capacity
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import Lean
from autoscaler.snapshot import (
    POOLS,
    DecodeSignals,
    LeaningTurn,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)


def seen(now_s: float, prefill: str, decode: str, window_s: float = 60.0, neutral: bool = True) -> Snapshot:
    """One letter a worker."""
    sides = [
        tuple(Replica(name, ReplicaState.READY, 0.0, neutral=neutral) for name in names)
        for names in (prefill, decode)
    ]
    return Snapshot(now_s, PrefillSignals(sides[0]), DecodeSignals(sides[1]), window_s=window_s)


def turned(watch: TurnWatch, snapshot: Snapshot) -> list[tuple[str, str, float]]:
    return [(turn.name, turn.pool, turn.at_s) for turn in watch.look(snapshot).turns]


def test_a_move_counts_for_a_window() -> None:
    for window_s, kept_s in ((60.0, 60.0), (5.0, LEAST_S)):
        watch = TurnWatch()
        assert turned(watch, seen(0.0, "ab", "c", window_s)) == []
        assert turned(watch, seen(5.0, "a", "bc", window_s)) == [("b", "decode", 5.0)]
        assert turned(watch, seen(4.9 + kept_s, "a", "bc", window_s)) == [("b", "decode", 5.0)]
        assert turned(watch, seen(5.0 + kept_s, "a", "bc", window_s)) == []


def test_what_a_plan_has_ordered_is_no_move_even_where_it_comes_late() -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    watch.told([Lean("decode", "b")], 0.0)
    assert turned(watch, seen(5.0, "ab", "c")) == []
    watch.told([Lean("decode", "b")], 5.0)
    assert turned(watch, seen(10.0, "a", "bc")) == []
    watch.told([], 10.0)
    assert turned(watch, seen(15.0, "ab", "c")) == [("b", "prefill", 15.0)]
    watch.told([Lean("decode", "b")], 15.0)
    assert turned(watch, seen(20.0, "ab", "c")) == [], "a plan has it now"


@pytest.mark.parametrize("partial", [1, 3])
def test_an_order_holds_until_a_whole_plan_is_without_it(partial: int) -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    watch.told([Lean("decode", "b")], 0.0)
    for tick in range(1, 1 + partial):  # a coordinator is silent, or the decision takes long
        assert turned(watch, seen(5.0 * tick, "ab", "c")) == []
        watch.told([], 5.0 * tick, whole=False)
    assert turned(watch, seen(20.0, "a", "bc")) == [], "it has followed"
    watch.told([], 20.0, whole=False)
    assert turned(watch, seen(25.0, "ab", "c")) == [("b", "prefill", 25.0)]
    assert turned(watch, seen(30.0, "a", "bc"))[1:] == [("b", "decode", 30.0)], "an order is followed once"


@pytest.mark.parametrize(("whole", "later_s"), [(True, 5.0), (False, TOLD_S)])
def test_an_order_that_a_whole_plan_is_without_or_that_is_old_holds_no_more(
    whole: bool, later_s: float
) -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    watch.told([Lean("decode", "b")], 0.0)
    assert turned(watch, seen(later_s, "ab", "c")) == []
    watch.told([], later_s, whole=whole)
    assert turned(watch, seen(later_s + 5.0, "a", "bc")) == [("b", "decode", later_s + 5.0)]


def test_an_order_holds_for_one_look_however_late_that_is() -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    watch.told([Lean("decode", "b")], 0.0)
    assert turned(watch, seen(300.0, "a", "bc")) == []


def test_one_that_does_not_act_takes_nobodys_plan_for_a_planners_move() -> None:
    """Nor does it once it acts; its own orders and moves of before hold no more."""
    watch = TurnWatch()
    watch.look(seen(0.0, "abc", "d"))
    watch.told([Lean("decode", "a")], 0.0)
    assert turned(watch, seen(5.0, "ab", "cd")) == [("c", "decode", 5.0)]
    for now_s, prefill, decode in ((10.0, "ab", "cd"), (15.0, "b", "acd")):
        assert turned(watch, replace(seen(now_s, prefill, decode), acting=False)) == []
    assert turned(watch, seen(20.0, "", "abcd")) == [], "the other one's last order"
    assert turned(watch, seen(25.0, "a", "bcd")) == [("a", "prefill", 25.0)]


def test_who_is_new_lost_or_pinned_has_not_moved() -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    assert turned(watch, seen(5.0, "a", "cd")) == []
    assert turned(watch, seen(10.0, "a", "bcd")) == [], "another boot, as far as is known"
    assert turned(watch, seen(15.0, "abcd", "", neutral=False)) == []


def test_a_coordinator_that_is_silent_hides_no_move() -> None:
    watch = TurnWatch()
    watch.look(seen(0.0, "ab", "c"))
    watch.look(replace(seen(5.0, "a", "c"), complete=False))
    assert turned(watch, seen(10.0, "a", "bc")) == [("b", "decode", 10.0)]


def test_units_are_those_of_each_side() -> None:
    classes = [{"name": "slow", "price_per_hour": 1.0}, {"name": "fast", "price_per_hour": 2.0, "speed": 4}]
    pool = {"target_ms": 100, "max_replicas": 9}
    decode = [classes[0], classes[1] | {"speed": 2}]
    policy = parse_policy(
        {"workers": "neutral", "prefill": pool | {"classes": classes}, "decode": pool | {"classes": decode}}
    )
    turns = [LeaningTurn("a", "decode", 5.0, "fast"), LeaningTurn("b", "prefill", 10.0, "slow")]
    found = turned_capacity(policy, turns, 5.0)
    assert [found[pool] for pool in POOLS] == [TurnedCapacity(1, -3), TurnedCapacity(-1, 1)]
    assert (found["prefill"].wanted(9, 2), found["prefill"].wanted(1, 2)) == (2, 1)
    assert (found["decode"].wanted(9, 2), found["decode"].wanted(1, 2)) == (9, 2)
