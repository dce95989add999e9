"""Loads have the rate, the burstiness and the lengths that they say, and follow from their seed."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from bench.goodput.mixes import FOLLOW_UP, LONG_TOKENS, MIXES, SYSTEM_TOKENS, THINK_S, TURNS, planned
from bench.goodput.turns import turn_order

MANY = 4000
SINGLE = [name for name, mix in MIXES.items() if not mix.conversation]


def _waits(name: str, rate: float, seed: int) -> list[float]:
    times = [0.0, *(one.at_s for one in planned(name, rate, MANY, seed))]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_arrivals_have_the_rate_and_the_variation_asked_for(name: str, rate: float) -> None:
    cv = MIXES[name].cv
    waits = _waits(name, rate, 0)
    # Five standard errors of the mean of so many.
    assert fmean(waits) == pytest.approx(1 / rate, rel=5 * cv / MANY**0.5)
    assert pstdev(waits) / fmean(waits) == pytest.approx(cv, rel=0.15)


def test_bursts_are_at_cv_three() -> None:
    assert MIXES["bursty"].cv == 3.0
    assert {mix.cv for name, mix in MIXES.items() if name != "bursty"} == {1.0}


@pytest.mark.parametrize("name", SINGLE)
def test_lengths_and_shares_are_those_of_the_classes(name: str) -> None:
    requests = planned(name, 1.0, MANY, 1)
    for drawn in MIXES[name].classes:
        own = [one for one in requests if one.kind == drawn.name]
        assert len(own) / MANY == pytest.approx(drawn.share, abs=0.04)
        for (least, most), lengths in (
            (drawn.prompt_tokens, [len(one.prompt) for one in own]),
            (drawn.output_tokens, [one.output_tokens for one in own]),
        ):
            assert least <= min(lengths) <= max(lengths) <= most
            assert fmean(lengths) == pytest.approx((least + most) / 2, rel=0.05)
        assert (drawn.prompt_tokens[0] >= LONG_TOKENS) == (drawn.name == "long")


def test_the_measured_mix_is_that_of_the_figures() -> None:
    short, long = MIXES["measured"].classes
    assert (short.share, short.prompt_tokens, short.output_tokens) == (0.8, (64, 128), (24, 48))
    assert (long.share, long.prompt_tokens, long.output_tokens) == (0.2, (512, 1024), (24, 48))


@pytest.mark.parametrize("name", MIXES)
def test_a_seed_says_everything(name: str) -> None:
    assert planned(name, 2.0, 20, 5) == planned(name, 2.0, 20, 5)
    prompts = {one.prompt for seed in (5, 6) for rate in (1.0, 2.0) for one in planned(name, rate, 20, seed)}
    assert len(prompts) == 80


@pytest.mark.parametrize("name", SINGLE)
def test_single_prompts_share_no_block(name: str) -> None:
    first = [one.prompt[:16] for seed in (0, 1) for one in planned(name, 1.0, 300, seed)]
    assert len(set(first)) == len(first)


def test_turns_of_a_conversation_begin_with_the_turn_before() -> None:
    requests = planned("conversation", 2.0, 400, 3)
    system = requests[0].prompt[:SYSTEM_TOKENS]
    assert all(one.prompt[:SYSTEM_TOKENS] == system for one in requests)
    assert system != planned("conversation", 2.0, 1, 4)[0].prompt[:SYSTEM_TOKENS]
    openings = [one for one in requests if one.kind == "opening"]
    follow_ups = [one for one in requests if one.kind == "follow-up"]
    assert len(openings) + len(follow_ups) == len(requests)
    assert len(follow_ups) / len(requests) == pytest.approx(FOLLOW_UP, abs=0.1)
    for opening in openings:
        turns = [one for one in requests if one.prompt[: len(opening.prompt)] == opening.prompt]
        assert 1 <= len(turns) <= TURNS
        for before, after in pairwise(turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) >= len(before.prompt) + before.output_tokens
            assert after.at_s - before.at_s >= THINK_S


def test_systems_take_turns_forward_and_backward() -> None:
    keys = turn_order([("measured", 1.0), ("bursty", 2.0)], range(8, 10), 300, ["a", "b", "c"], "model")
    assert [(key.seed, key.mix, key.system) for key in keys] == [
        *((8, mix, system) for mix in ("measured", "bursty") for system in "abc"),
        *((9, mix, system) for mix in ("measured", "bursty") for system in "cba"),
    ]
