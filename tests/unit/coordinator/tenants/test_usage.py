"""Token buckets: what they admit, and that retry hints are neither too short nor too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tenants.usage import Bucket, Limit, full, hint_s, level, spend, wait_s

rates = st.floats(0.01, 1e6)
bursts = st.floats(1, 1e6)
limits = st.builds(Limit, rates, bursts)
amounts = st.floats(0, 1e6)
times = st.floats(0, 1e6)


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    limit = Limit(2.0, 10.0)
    bucket = full(limit, 100.0)
    assert wait_s(bucket, limit, 10, 100.0) == 0
    bucket = spend(bucket, limit, 10, 100.0)
    assert wait_s(bucket, limit, 1, 100.0) == pytest.approx(0.5)
    assert level(bucket, limit, 101.0) == pytest.approx(2)
    assert level(bucket, limit, 1000.0) == 10


def test_a_debt_is_waited_out() -> None:
    limit = Limit(10.0, 20.0)
    bucket = spend(full(limit, 0.0), limit, 70, 0.0)
    assert level(bucket, limit, 0.0) == -50
    assert wait_s(bucket, limit, 0, 0.0) == pytest.approx(5)
    assert wait_s(bucket, limit, 0, 5.0) == 0


def test_more_than_the_burst_goes_from_a_full_bucket() -> None:
    limit = Limit(10.0, 20.0)
    assert wait_s(full(limit, 0.0), limit, 500, 0.0) == 0
    half = spend(full(limit, 0.0), limit, 10, 0.0)
    assert wait_s(half, limit, 500, 0.0) == pytest.approx(1)


def test_time_that_runs_backwards_changes_nothing() -> None:
    limit = Limit(1.0, 5.0)
    bucket = Bucket(2.0, 50.0)
    assert level(bucket, limit, 40.0) == 2
    assert spend(bucket, limit, 1, 40.0) == Bucket(1.0, 50.0)


@given(limits, amounts, amounts, times)
def test_a_client_that_waits_as_hinted_is_admitted(
    limit: Limit, spent: float, wanted: float, now: float
) -> None:
    bucket = spend(full(limit, now), limit, spent, now)
    hint = hint_s(wait_s(bucket, limit, wanted, now))
    # A clock at 1e6 s has steps of 1e-10 s; what they hide is far below a request or token at these rates.
    assert wait_s(bucket, limit, wanted, now + hint) * limit.rate_per_s < 1e-3


@given(limits, amounts, amounts, times)
def test_the_wait_is_not_longer_than_needed(limit: Limit, spent: float, wanted: float, now: float) -> None:
    bucket = spend(full(limit, now), limit, spent, now)
    hint = wait_s(bucket, limit, wanted, now)
    if hint > 0.01:
        assert wait_s(bucket, limit, wanted, now + 0.9 * hint) > 0


@given(limits, st.lists(st.tuples(st.floats(0, 5), amounts), max_size=30))
def test_burst_and_rate_bound_what_is_admitted(limit: Limit, asks: list[tuple[float, float]]) -> None:
    bucket, now, passed = full(limit, 0.0), 0.0, 0.0
    for pause, amount in asks:
        now += pause
        asked = min(amount, limit.burst)
        if wait_s(bucket, limit, asked, now) == 0:
            bucket = spend(bucket, limit, asked, now)
            passed += asked
    assert passed <= limit.burst + limit.rate_per_s * now + 1e-3 * (1 + passed)


def test_hints_are_rounded_up() -> None:
    assert hint_s(0.0001) == 0.001
    assert hint_s(0.25) == 0.25
    assert hint_s(1.0004) == 1.001
