"""Token buckets: what they admit, and that retry hints are neither too short nor too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tenants.usage import Bucket, Limit, hint_s

rates = st.floats(0.01, 1e6)
bursts = st.floats(1, 1e6)
limits = st.builds(Limit, rates, bursts)
amounts = st.floats(0, 1e6)
times = st.floats(0, 1e6)


def spent(limit: Limit, amount: float, now: float = 0.0) -> Bucket:
    bucket = Bucket(limit, now)
    bucket.spend(amount, now)
    return bucket


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    limit = Limit(2.0, 10.0)
    assert Bucket(limit, 100.0).wait_s(10, 100.0) == 0
    bucket = spent(limit, 10, 100.0)
    assert bucket.wait_s(1, 100.0) == pytest.approx(0.5)
    assert bucket.level(101.0) == pytest.approx(2)
    assert bucket.level(1000.0) == 10


def test_a_debt_is_waited_out() -> None:
    bucket = spent(Limit(10.0, 20.0), 70)
    assert bucket.level(0.0) == -50
    assert bucket.wait_s(0, 0.0) == pytest.approx(5)
    assert bucket.wait_s(0, 5.0) == 0


def test_more_than_the_burst_goes_from_a_full_bucket() -> None:
    limit = Limit(10.0, 20.0)
    assert Bucket(limit, 0.0).wait_s(500, 0.0) == 0
    assert spent(limit, 10).wait_s(500, 0.0) == pytest.approx(1)


def test_time_that_runs_backwards_changes_nothing() -> None:
    bucket = spent(Limit(1.0, 5.0), 3, 50.0)
    assert bucket.level(40.0) == 2
    bucket.spend(1, 40.0)
    assert (bucket.level(50.0), bucket.level(51.0)) == (1, 2)


@given(limits, amounts, amounts, times)
def test_a_client_that_waits_as_hinted_is_admitted_and_waits_no_longer_than_needed(
    limit: Limit, taken: float, wanted: float, now: float
) -> None:
    bucket = spent(limit, taken, now)
    wait_s = bucket.wait_s(wanted, now)
    # A clock at 1e6 s has steps of 1e-10 s; what they hide is far below a request or token at these rates.
    assert bucket.wait_s(wanted, now + hint_s(wait_s)) * limit.rate_per_s < 1e-3
    if wait_s > 0.01:
        assert bucket.wait_s(wanted, now + 0.9 * wait_s) > 0


@given(limits, st.lists(st.tuples(st.floats(0, 5), amounts), max_size=30))
def test_burst_and_rate_bound_what_is_admitted(limit: Limit, asks: list[tuple[float, float]]) -> None:
    bucket, now, passed = Bucket(limit, 0.0), 0.0, 0.0
    for pause, amount in asks:
        now += pause
        asked = min(amount, limit.burst)
        if bucket.wait_s(asked, now) == 0:
            bucket.spend(asked, now)
            passed += asked
    assert passed <= limit.burst + limit.rate_per_s * now + 1e-3 * (1 + passed)


def test_hints_are_rounded_up() -> None:
    assert hint_s(0.0001) == 0.001
    assert hint_s(0.25) == 0.25
    assert hint_s(1.0004) == 1.001
