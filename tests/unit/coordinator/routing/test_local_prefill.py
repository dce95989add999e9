"""When the decode worker computes a prompt itself: the decision, from measured rates alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.routing.local_prefill import NO_LIMIT, HandoffMeter, LocalPrefillFacts, local_prefill_tokens

IDLE = LocalPrefillFacts(split_s=0.1, tokens_per_s=1000.0)


def test_idle_both_take_as_long() -> None:
    assert local_prefill_tokens(IDLE) == 100


def test_a_slower_decode_worker_computes_less() -> None:
    assert local_prefill_tokens(replace(IDLE, tokens_per_s=500.0)) == 50


def test_prompts_that_wait_there_already_come_first() -> None:
    assert local_prefill_tokens(replace(IDLE, waiting_tokens=60)) == 40
    assert local_prefill_tokens(replace(IDLE, waiting_tokens=200)) == 0


def test_every_running_sequence_is_stalled_meanwhile() -> None:
    assert local_prefill_tokens(replace(IDLE, running_requests=1)) == 50
    assert local_prefill_tokens(replace(IDLE, running_requests=9)) == 10


@pytest.mark.parametrize("running", [0, 3])
def test_arrivals_bound_the_time_by_the_root_of_the_cost(running: int) -> None:
    facts = replace(IDLE, running_requests=running, arrivals_per_s=8.0)
    compute_s = local_prefill_tokens(facts) / facts.tokens_per_s
    cost_s = compute_s * (1 + running) + facts.arrivals_per_s * compute_s**2 / 2
    assert cost_s == pytest.approx(facts.split_s, abs=2e-3 * (1 + running))
    assert cost_s <= facts.split_s
    busier = replace(facts, arrivals_per_s=80.0)
    assert local_prefill_tokens(busier) < local_prefill_tokens(facts)


def test_a_costlier_handoff_makes_longer_prompts_worth_it() -> None:
    limits = [local_prefill_tokens(replace(IDLE, split_s=split_s)) for split_s in (0.01, 0.1, 1.0)]
    assert limits == sorted(limits)
    assert len(set(limits)) == 3


def test_nothing_measured_means_never() -> None:
    assert local_prefill_tokens(replace(IDLE, tokens_per_s=0.0)) == 0
    assert local_prefill_tokens(replace(IDLE, split_s=0.0)) == 0


def test_the_limit_fits_its_message() -> None:
    assert local_prefill_tokens(LocalPrefillFacts(split_s=1e9, tokens_per_s=1e9)) == NO_LIMIT


def test_the_meter_averages_handoffs() -> None:
    meter = HandoffMeter()
    assert meter.handoff_s == 0.0
    meter.record(0.004)
    assert meter.handoff_s == pytest.approx(0.004)
    meter.record(0.014)
    assert meter.handoff_s == pytest.approx(0.005)


def test_the_meter_forgets_old_arrivals() -> None:
    meter = HandoffMeter()
    for request in range(1000):
        meter.count_arrival(request / 5)
    assert meter.arrivals_per_s(200.0) == pytest.approx(5.0, rel=0.05)
    assert meter.arrivals_per_s(300.0) < 0.01
