"""Which neutral worker is asked to lean elsewhere, and that planners never overdo it, however many there are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.leanings.leaning_planner import (
    CLEARLY,
    MOVE_EVERY_S,
    ORDER_LASTS_S,
    RETURN_AFTER_S,
    LeaningMemory,
    plan_leanings,
)
from coordinator.leanings.pressure import Pressure, WorkerWork
from coordinator.workers.snapshot import PoolName, WorkerKey

CALM, PROMPTS, TOKENS = Pressure(0.5, 0.5), Pressure(2.0, 0.5), Pressure(0.5, 2.0)


def work(
    name: str, pool: PoolName, prompt_s: float = 0.0, streams: int = 0, neutral: bool = True
) -> WorkerWork:
    return WorkerWork((name, 1), pool, neutral, prompt_s, streams, 0)


FOUR = [
    work("a", "prefill"),
    work("b", "prefill"),
    work("c", "decode", streams=3),
    work("d", "decode", streams=2),
]


def looks(works: list[WorkerWork], *pressures: Pressure | None, every_s: float = 1.0) -> LeaningMemory:
    memory = LeaningMemory()
    for number, pressure in enumerate(pressures):
        memory = plan_leanings(memory, works, pressure, number * every_s)
    return memory


def asked(memory: LeaningMemory) -> tuple[str, PoolName] | None:
    return None if memory.order is None else (memory.order.key[0], memory.order.pool)


def test_of_several_classes_a_slow_one_goes_first() -> None:
    """Also where it has more to do; nearly the same rates are one class."""
    rates = {"a": 4000.0, "b": 990.0, "c": 1100.0, "d": 1000.0}
    works = [replace(one, prompt_tokens_per_s=rates[one.key[0]]) for one in FOUR]
    assert asked(looks(works, TOKENS, TOKENS)) == ("b", "decode")
    assert asked(looks(works, PROMPTS, PROMPTS)) == ("d", "prefill"), "the one with fewer streams"
    unmeasured = [replace(works[0], prompt_tokens_per_s=0.0), *works[1:]]
    assert asked(looks(unmeasured, TOKENS, TOKENS)) == ("a", "decode")


@pytest.mark.parametrize(
    ("pressures", "expected"),
    [
        ([PROMPTS], None),  # one look may be a burst
        ([PROMPTS, PROMPTS], ("d", "prefill")),  # the one with fewer streams
        ([PROMPTS, TOKENS], None),
        ([TOKENS, TOKENS], ("a", "decode")),
        ([CALM, CALM, CALM], None),
        ([Pressure(0.9, 0.1)] * 3, None),  # no target is in danger
        ([Pressure(2.0, 2.0 / CLEARLY + 0.01)] * 3, None),  # nor is the other side much better off
        ([None, None], None),
    ],
)
def test_a_side_that_is_clearly_pressed_in_two_looks_gets_a_worker(
    pressures: list[Pressure | None], expected: tuple[str, PoolName] | None
) -> None:
    assert asked(looks(FOUR, *pressures)) == expected


def test_two_looks_are_a_second_apart() -> None:
    assert asked(looks(FOUR, PROMPTS, PROMPTS, every_s=0.4)) is None
    assert asked(looks(FOUR, PROMPTS, PROMPTS, PROMPTS, PROMPTS, every_s=0.4)) is not None


def test_each_side_keeps_a_worker_and_one_that_has_none_gets_one() -> None:
    two = [work("a", "prefill"), work("c", "decode", streams=9)]
    assert asked(looks(two, PROMPTS, PROMPTS)) is None
    assert asked(looks([work("a", "prefill")], TOKENS, TOKENS)) is None
    assert asked(looks([work("a", "decode"), work("b", "decode")], CALM, CALM)) == ("a", "prefill")


def test_pinned_workers_stay_and_count() -> None:
    pinned = [work("p", "prefill", neutral=False), work("d", "decode", neutral=False), work("w", "decode")]
    assert asked(looks(pinned, PROMPTS, PROMPTS)) == ("w", "prefill")
    assert asked(looks([*pinned[:2], work("e", "decode", neutral=False)], PROMPTS, PROMPTS)) is None


def test_an_order_stands_until_it_is_followed_or_has_failed() -> None:
    memory = looks(FOUR, PROMPTS, PROMPTS)
    assert asked(plan_leanings(memory, FOUR, CALM, 10.0)) == ("d", "prefill")
    assert asked(plan_leanings(memory, FOUR, CALM, 1.0 + ORDER_LASTS_S)) is None
    followed = [*FOUR[:3], replace(FOUR[3], pool="prefill")]
    assert asked(plan_leanings(memory, followed, PROMPTS, 2.0)) is None
    assert asked(plan_leanings(memory, FOUR[:3], PROMPTS, 2.0)) is None, "it has left"
    assert asked(plan_leanings(memory, FOUR, None, 2.0)) is None, "a plan decides now"


@dataclass
class Cluster:
    """Workers that follow the latest order after a while, under planners that each look in turn."""

    works: dict[WorkerKey, WorkerWork]
    planners: list[LeaningMemory]
    follows_s: float
    asked: dict[WorkerKey, tuple[PoolName, float]] = field(default_factory=dict)
    moves: list[tuple[float, WorkerKey]] = field(default_factory=list)

    def look(self, number: int, pressure: Pressure, now: float) -> None:
        for key, (pool, since_s) in list(self.asked.items()):
            if now >= since_s + self.follows_s:
                if self.works[key].pool != pool:
                    self.works[key] = replace(self.works[key], pool=pool)
                    self.moves.append((now, key))
                del self.asked[key]
        before = self.planners[number]
        after = self.planners[number] = plan_leanings(before, list(self.works.values()), pressure, now)
        if after.order is not None:
            self.asked.setdefault(after.order.key, (after.order.pool, now))

    def leaning(self, pool: PoolName) -> int:
        return sum(work.pool == pool for work in self.works.values())


pressures_st = st.builds(
    Pressure, st.sampled_from([0.0, 0.5, 0.9, 1.1, 3.0]), st.sampled_from([0.0, 0.9, 1.1, 3.0])
)


def cluster(leanings: list[PoolName], planners: int, follows_s: float) -> Cluster:
    works = {(f"w{n}", 1): work(f"w{n}", pool, streams=n % 3) for n, pool in enumerate(leanings)}
    return Cluster(works, [LeaningMemory()] * planners, follows_s)


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["prefill", "decode"]), min_size=1, max_size=6),
    st.lists(pressures_st, min_size=80, max_size=120),
    st.sampled_from([0.0, 0.6, 2.0]),
)
def test_no_worker_goes_back_within_30_s_however_many_planners_look(
    planners: int, leanings: list[PoolName], pressures: list[Pressure], follows_s: float
) -> None:
    """The planners see different pressures, at different times, and one plain truth about who leans where."""
    here = cluster(leanings, planners, follows_s)
    for step, pressure in enumerate(pressures):
        here.look(step % planners, pressure, step / planners)
    last: dict[WorkerKey, float] = {}
    for at_s, key in here.moves:
        assert at_s - last.get(key, -1e9) >= RETURN_AFTER_S
        last[key] = at_s


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["prefill", "decode"]), min_size=2, max_size=6),
    st.lists(pressures_st, min_size=60, max_size=90),
    st.sampled_from([0.0, 0.6, 2.0]),
)
def test_one_planner_never_empties_a_side_nor_moves_two_in_5_s(
    leanings: list[PoolName], pressures: list[Pressure], follows_s: float
) -> None:
    here = cluster(leanings, 1, follows_s)
    had = {pool for pool in ("prefill", "decode") if here.leaning(pool)}
    for step, pressure in enumerate(pressures):
        here.look(0, pressure, float(step))
        assert all(here.leaning(pool) for pool in had)
    times = [at_s for at_s, _ in here.moves]
    # A worker that takes a while to follow moves later than it was asked to.
    assert all(b - a >= MOVE_EVERY_S - follows_s - 1 for a, b in pairwise(times))


@settings(deadline=None)
@given(st.integers(1, 3), st.lists(st.sampled_from(["prefill", "decode"]), min_size=3, max_size=6))
def test_a_load_that_has_turned_is_followed_within_10_s(planners: int, leanings: list[PoolName]) -> None:
    here = cluster([*leanings, "prefill", "prefill", "decode"], planners, 0.6)
    before = here.leaning("decode")
    for step in range(10 * planners):
        here.look(step % planners, TOKENS, step / planners)
    assert here.leaning("decode") > before
    assert here.leaning("prefill") >= 1


def test_planners_that_see_the_same_choose_the_same() -> None:
    here = cluster(["prefill", "decode", "decode", "decode"], 2, 0.6)
    for step in range(12):
        here.look(step % 2, PROMPTS, step / 2)
        assert len(here.asked) <= 1
    assert len(here.moves) == 1
