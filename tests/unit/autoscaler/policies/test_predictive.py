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


@pytest.mark.parametrize("ahead_s", [-86_400.0, 0.0, 5_000.0])
def test_a_gap_and_a_wall_clock_that_is_set_keep_the_phase(ahead_s: float) -> None:
    block = {"kind": "predictive", "target_ms": 1000, "season_s": 600 * SEASON, "interval_s": 600}
    pool = parse_policy({"prefill": block, "decode": {"target_ms": 50}}).prefill
    assert isinstance(pool, PredictivePool)
    now, status = 4 * SEASON, PoolStatus(2, 2, 0)
    memory = PredictiveMemory(interval=now, rates=tuple(1000 * rate(i) for i in range(now)))
    for index in (now, now + 1, now + 4):
        seen = hour(index)
        _, memory = recommend_predictive(
            pool, "prefill", memory, replace(seen, wall_s=seen.wall_s + ahead_s * (index > now)), status
        )
    assert memory.interval == now + 4
    assert memory.rates[-SEASON:] == pytest.approx(
        [1000 * rate(i) for i in range(now + 4 - SEASON, now + 4)], rel=0.05
    )
    assert memory.forecast[0] == pytest.approx(1000 * rate(now + 4), rel=0.1)
