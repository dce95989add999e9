"""Triage: as few late jobs as any order has, and no job that waits for ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pacing.triage import MAX_OWED_TOKENS, OLDEST_SHARE, Job, OldestTurn, triage

JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(-5, 60) | st.just(float("inf"))), max_size=7).map(
    lambda found: [Job(f"j{i}", float(work), float(due), i) for i, (work, due) in enumerate(found)]
)


def late_in(order: list[Job[str]]) -> int:
    now, late = 0.0, 0
    for job in order:
        now += job.work_s
        late += now > job.due_s
    return late


@settings(deadline=None)
@given(jobs=JOBS, keep_s=st.sampled_from([0.0, 3.0, float("inf")]))
def test_no_order_has_fewer_late_jobs(jobs: list[Job[str]], keep_s: float) -> None:
    by_key = {job.key: job for job in jobs}
    found = triage(jobs, keep_s=keep_s)
    order = [by_key[key] for key in found.order]
    assert sorted(job.arrival for job in order) == list(range(len(jobs)))
    assert len(found.late) >= late_in(order) == min(late_in(list(each)) for each in permutations(jobs))
    assert late_in([by_key[key] for key in found.in_time]) == 0


@given(jobs=JOBS)
def test_the_order(jobs: list[Job[str]]) -> None:
    by_key = {job.key: job for job in jobs}
    found = triage(jobs)
    dues = [by_key[key].due_s for key in found.in_time]
    sizes = [by_key[key].work_s for key in found.behind]
    assert dues == sorted(dues)
    assert sizes == sorted(sizes)
    assert found.order == found.in_time + found.behind
    dated = {key for key in found.behind if by_key[key].due_s < float("inf")}
    assert dated == found.late
    assert found.oldest_behind == min(found.behind, default=None)


def test_a_long_job_gives_way_to_the_short_ones_that_it_would_make_late() -> None:
    jobs = [Job("long", 8.0, 9.0, 0), Job("a", 2.0, 10.0, 1), Job("b", 2.0, 10.0, 2)]
    assert triage(jobs).in_time == ("a", "b")
    assert triage(jobs).late == {"long"}


def test_without_deadlines_jobs_go_by_size() -> None:
    jobs = [Job(str(n), 10.0 - n, float("inf"), n) for n in (2, 0, 1)]
    assert triage(jobs).order == ("2", "1", "0")


def test_those_behind_go_before_one_with_time_to_spare() -> None:
    """A due time far away is no way past those that are late."""
    jobs = [Job("soon", 1.0, 2.0, 0), Job("late", 2.0, 1.0, 1), Job("any", 3.0, float("inf"), 2)]
    jobs += [Job("far", 1.0, 60.0, 3), Job("farther", 1.0, 90.0, 4)]
    assert triage(jobs, keep_s=4.0).order == ("soon", "late", "any", "far", "farther")
    assert triage(jobs, keep_s=54.0).order == ("soon", "late", "far", "any", "farther")
    assert triage(jobs, keep_s=55.1).order == ("soon", "late", "far", "any", "farther")
    assert triage(jobs, keep_s=200.0).order == ("soon", "far", "farther", "late", "any")


@settings(deadline=None)
@given(jobs=JOBS, ahead=st.integers(0, 20))
def test_work_ahead_counts_as_earlier_deadlines(jobs: list[Job[str]], ahead: int) -> None:
    earlier = [replace(job, due_s=job.due_s - ahead) for job in jobs]
    assert triage(jobs, float(ahead)) == triage(earlier)


@settings(max_examples=50, deadline=None)
@given(chunk=st.integers(32, 512), size=st.integers(100, 5000))
def test_the_oldest_behind_gets_its_share_beside_an_endless_stream_of_others(chunk: int, size: int) -> None:
    """Urgent jobs never end; the late one is done when ten times its tokens, and a chunk or two, were computed."""
    turn: OldestTurn[str] = OldestTurn()
    left, computed = size, 0
    while left > 0:
        mine = turn.of("late", min(chunk, left))
        tokens = min(chunk, left) if mine else chunk
        left -= tokens if mine else 0
        computed += tokens
        turn.computed({"late" if mine else "urgent": tokens})
        assert computed <= (size + 2 * chunk) / OLDEST_SHARE


def test_the_oldest_behind_is_served_when_it_is_owed_a_whole_chunk() -> None:
    turn: OldestTurn[str] = OldestTurn()
    turn.of("a")
    turn.computed({"b": 990})
    assert not turn.of("a", 100)
    turn.computed({"b": 10})
    assert turn.of("a", 100)


def test_what_was_owed_is_forgotten_when_nobody_is_behind() -> None:
    turn: OldestTurn[str] = OldestTurn()
    turn.of("a")
    turn.computed({"b": 1000})
    assert turn.of("a")
    assert not turn.of(None)
    assert not turn.of("a")


def test_the_next_oldest_is_owed_what_the_last_one_was_but_does_not_pay_for_it() -> None:
    turn: OldestTurn[str] = OldestTurn()
    turn.of("a")
    turn.computed({"b": 1000})
    assert turn.of("c")
    turn.computed({"c": 5000})
    assert not turn.of("c")
    assert not turn.of("d")
    turn.computed({"b": 100})
    assert turn.of("d")


def test_what_is_owed_is_bounded() -> None:
    turn: OldestTurn[str] = OldestTurn()
    turn.of("a")
    turn.computed({"b": 10**6})
    turn.computed({"a": round(MAX_OWED_TOKENS / (1 - OLDEST_SHARE)) + 1})
    assert not turn.of("a")
