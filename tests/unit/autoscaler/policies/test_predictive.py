"""Policies of kind `predictive`: ready before the season's peak, and never below what `slo` wants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import PredictivePool, parse_policy
from autoscaler.policies.predictive import PredictiveMemory, forecast_rates, recommend_predictive
from autoscaler.policies.recommendation import PoolStatus
from autoscaler.snapshot import ArrivalBucket, Snapshot
from tests.support.scaling.snapshots import snapshot

pytest.importorskip("statsmodels")

SEASON, STEPS = 8, 8


def rate(index: int) -> float:
    return 20.0 + 18.0 * math.sin(2 * math.pi * index / SEASON)


@pytest.mark.slow
def test_the_forecast_repeats_the_season() -> None:
    ahead = forecast_rates([rate(i) for i in range(3 * SEASON)], SEASON, STEPS, 50)
    assert ahead == pytest.approx([rate(i) for i in range(STEPS)], abs=1.5)


def test_a_higher_percentile_covers_more() -> None:
    noisy = [rate(i) + (3 if i % 5 == 0 else -1) for i in range(3 * SEASON)]
    assert forecast_rates(noisy, SEASON, 1, 95)[0] > forecast_rates(noisy, SEASON, 1, 50)[0] + 1


def test_two_seasons_are_needed() -> None:
    assert forecast_rates([rate(i) for i in range(2 * SEASON - 1)], SEASON, 1, 80) == ()
    assert forecast_rates([1.0, 2.0, 3.0, 4.0] * 3, 4, 1, 80) == ()
    assert forecast_rates([4.0] * 3 * SEASON, SEASON, 2, 80) == (4.0, 4.0)


def hour(index: int) -> Snapshot:
    """A snapshot ten seconds before the end of an interval of 600 s that is fully recorded."""
    start = 600.0 * index
    requests = int(rate(index) * 10)
    record = tuple(
        ArrivalBucket(start + 10 * i, 10.0, requests, requests * 1000, requests * 1000, 200.0 * requests)
        for i in range(59)
    )
    return replace(
        snapshot(start + 590.0, prefill=2, decode=2), arrivals=record, wall_s=1e6 * 600 + start + 590.0
    )


def test_replicas_are_ordered_before_the_peak_and_slo_is_the_floor() -> None:
    pools = {
        "prefill": {"target_ms": 1000, "max_replicas": 60, "slo": {"settle_s": 300}},
        "decode": {"target_ms": 50, "max_replicas": 60, "slo": {"settle_s": 300}},
    }
    blind = make_decide(parse_policy(pools))
    seeing = {
        name: {**block, "kind": "predictive", "season_s": 600 * SEASON, "interval_s": 600}
        for name, block in pools.items()
    }
    sighted = make_decide(parse_policy(seeing))
    memory_b = memory_s = None
    more = 0
    for index in range(3 * SEASON + 3):
        without, memory_b = blind(memory_b, hour(index))
        within, memory_s = sighted(memory_s, hour(index))
        assert within.prefill.desired >= without.prefill.desired
        assert within.decode.desired >= without.decode.desired
        if index >= 3 * SEASON:  # The rising flank.
            more += within.prefill.desired > without.prefill.desired and "forecast" in within.prefill.reason
    assert more >= 2


def test_a_wall_clock_that_is_set_back_forgets_only_what_is_now_to_come() -> None:
    pool = parse_policy(
        {"prefill": {"kind": "predictive", "target_ms": 1000, "season_s": 600 * SEASON, "interval_s": 600}}
        | {"decode": {"target_ms": 50}}
    ).prefill
    assert isinstance(pool, PredictivePool)
    memory, status = None, PoolStatus(2, 2, 0)
    for index in range(3 * SEASON):
        _, memory = recommend_predictive(pool, "prefill", memory, hour(index), status)
    assert memory is not None
    right = memory
    ten_days = 86_400 * 10  # a whole number of seasons
    for index in range(3 * SEASON, 3 * SEASON + 2):  # ahead for 20 minutes
        seen = hour(index)
        _, memory = recommend_predictive(
            pool, "prefill", memory, replace(seen, wall_s=seen.wall_s + ten_days), status
        )
    back = hour(3 * SEASON + 2)
    _, memory = recommend_predictive(pool, "prefill", memory, back, status)
    assert memory.interval == math.floor(back.wall_s / 600)
    assert memory.forecast[0] == pytest.approx(1000 * rate(2), rel=0.1)
    assert len(memory.rates) <= len(right.rates) + 3
    # A clock that is corrected by seconds changes nothing.
    _, nudged = recommend_predictive(
        pool, "prefill", memory, replace(back, wall_s=back.wall_s - 595.0, arrivals=()), status
    )
    assert nudged.interval == memory.interval


def _pool(season: int, interval_s: float) -> PredictivePool:
    block = {
        "kind": "predictive",
        "target_ms": 1000,
        "season_s": interval_s * season,
        "interval_s": interval_s,
    }
    pool = parse_policy({"prefill": block, "decode": {"target_ms": 50}}).prefill
    assert isinstance(pool, PredictivePool)
    return pool


@pytest.mark.parametrize("recorded", [48, 60, 96])
def test_no_jump_of_the_wall_clock_forward_and_back_costs_the_forecast(recorded: int) -> None:
    pool, status, first = _pool(24, 3600.0), PoolStatus(2, 2, 0), snapshot(0.0, prefill=2, decode=2)
    for jump in range(5, 242):
        memory = PredictiveMemory(interval=recorded, rates=(20.0,) * recorded)  # steady: needs no fit
        for index, ahead in ((recorded, 0), (recorded + 1, jump), (recorded + 2, 0)):
            start = 3600.0 * index
            bucket = ArrivalBucket(start, 3500.0, 1, 70_000, 70_000, 1.0)
            now_s = start + 3500.0
            seen = replace(first, now_s=now_s, arrivals=(bucket,), wall_s=now_s + 3600.0 * ahead)
            _, memory = recommend_predictive(pool, "prefill", memory, seen, status)
        assert memory.interval == recorded + 2
        assert len(memory.rates) >= 48, jump
        assert memory.forecast == (20.0,) * 24, jump


@pytest.mark.parametrize("jump", [5, 20, 31])
def test_a_wall_clock_set_forward_and_back_keeps_the_phase(jump: int) -> None:
    pool, status = _pool(SEASON, 600.0), PoolStatus(2, 2, 0)
    now = 4 * SEASON
    memory = PredictiveMemory(interval=10**6 + now, rates=tuple(1000 * rate(i) for i in range(now)))
    for index, ahead in ((now, 0), (now + 1, jump), (now + 2, 0)):
        seen = hour(index)
        _, memory = recommend_predictive(
            pool, "prefill", memory, replace(seen, wall_s=seen.wall_s + 600.0 * ahead), status
        )
    assert memory.forecast
    # The hour that was recorded with the wrong clock may be missing or stand elsewhere.
    kept = enumerate(memory.rates[-SEASON:])
    assert sum(abs(was - 1000 * rate(now + 2 + i)) > 1000 for i, was in kept) <= 1
