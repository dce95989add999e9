"""Who computes a prompt with a target: the rules, and what must hold whatever the figures are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.pair_choice import (
    LEAST_SHARE,
    MARGIN,
    MIX_SHARE,
    PromptPlace,
    choose_place,
    granted_tokens,
    pressure_on_streams,
    share_left,
)
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit

LEFT_S = 1.0 / MARGIN
"""Plans have a second."""
seconds = st.floats(0, 10)
shares = st.floats(LEAST_SHARE, 1)
places = st.builds(PromptPlace, seconds, st.floats(0.001, 5), shares, st.floats(0, 1))


def ready(ready_s: float) -> PromptPlace:
    return PromptPlace(ready_s / 2, ready_s / 2)


@pytest.mark.parametrize(
    ("prefill_s", "decodes_s", "chosen"),
    [
        (0.3, [0.01], None),  # soon: streams are left alone
        (0.31, [0.9, 0.4], 1),  # in time on decode, though prefill be sooner
        (0.31, [1.01], None),
        (1.0, [1.01], None),  # prefill alone is in time
        (2.0, [1.5], None),  # both are late: 25% is not worth a stream's time
        (2.0, [1.4, 1.39], 1),
        (2.0, [0.99], 0),
        (2.0, [], None),
    ],
)
def test_rules(prefill_s: float, decodes_s: list[float], chosen: int | None) -> None:
    assert choose_place(ready(prefill_s), [ready(each) for each in decodes_s], LEFT_S) == chosen


def test_a_late_prompt_goes_where_it_takes_a_third_less() -> None:
    for left_s in (0.0, -3.0):
        assert choose_place(ready(1.0), [ready(0.71)], left_s) is None
        assert choose_place(ready(1.0), [ready(0.7)], left_s) == 0


@given(places, st.lists(places, max_size=5), st.floats(-5, 10))
def test_nobody_in_time_is_passed_over_for_one_who_is_late(
    prefill: PromptPlace, decodes: list[PromptPlace], left_s: float
) -> None:
    chosen = choose_place(prefill, decodes, left_s)
    taken = prefill if chosen is None else decodes[chosen]
    able = [each for each in decodes if each.has_room]
    if any(each.ready_s <= MARGIN * left_s for each in (prefill, *able)):
        assert taken.ready_s <= MARGIN * left_s
    else:
        assert taken.ready_s <= prefill.ready_s


@given(places, st.lists(places, min_size=1, max_size=5), st.floats(-5, 10), st.floats(0, 5))
def test_more_work_elsewhere_never_draws_a_prompt_there(
    prefill: PromptPlace, decodes: list[PromptPlace], left_s: float, more_s: float
) -> None:
    if choose_place(prefill, decodes, left_s) is None:
        busier = [replace(each, ahead_s=each.ahead_s + more_s) for each in decodes]
        assert choose_place(prefill, busier, left_s) is None


def test_streams_take_their_share() -> None:
    fit, prompts = DecodeStepFit(0.01, 0.001, 1e-6), PromptFit(0.0, 1e-4, 0.0)
    assert share_left(fit, 5, 1000, 0.05, prompts) == pytest.approx(1 - 0.016 / 0.045)
    assert share_left(fit, 100, 100_000, 0.05, prompts) == LEAST_SHARE
    for unknown in ((None, 5, 1000, 0.05), (fit, 0, 0, 0.05), (fit, 5, 1000, None)):
        assert share_left(*unknown, prompts) == 1


def test_chunks_between_tokens_take_their_price_too() -> None:
    """45 ms a token, of which a step leaves 35."""
    fit = DecodeStepFit(0.01, 0.0, 0.0)
    # One chunk after each step, of which 10 ms are not for tokens.
    assert share_left(fit, 1, 0, 0.05, PromptFit(0.010, 1e-4, 0.0)) == pytest.approx(25 / 45)
    assert share_left(fit, 1, 0, 0.05, PromptFit(0.004, 1e-4, 0.0, 0.006)) == pytest.approx(25 / 45)
    # The least chunk takes 40 + 32 ms, so it comes after about every second step.
    assert share_left(fit, 1, 0, 0.05, PromptFit(0.040, 1e-3, 0.0)) == pytest.approx(35 / 45 * 32 / 72)


@given(
    st.integers(1, 200), st.floats(1e-3, 0.2), st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(-0.1, 0.1)
)
def test_dearer_chunks_and_more_streams_never_leave_more(
    streams: int, tpot_s: float, base_s: float, token_s: float, mixing_s: float
) -> None:
    fit = DecodeStepFit(0.002, 0.0005, 0.0)
    prompts = PromptFit(base_s, token_s, 0.0, max(mixing_s, -base_s))
    share = share_left(fit, streams, 0, tpot_s, prompts)
    assert LEAST_SHARE <= share <= 1
    dearer = PromptFit(base_s + 0.01, token_s, 0.0, prompts.mixing_s)
    assert share_left(fit, streams, 0, tpot_s, dearer) <= share * (1 + 1e-9)
    assert share_left(fit, streams + 1, 0, tpot_s, prompts) <= share * (1 + 1e-9)


def test_a_grant_is_what_fits_and_never_less_than_what_is_lacking() -> None:
    fit = PromptFit(0.0, 1e-3, 0.0)
    assert granted_tokens(PromptPlace(0.2, 0.1, 0.5), fit, 100, 0, LEFT_S) == 300
    assert granted_tokens(PromptPlace(2.0, 0.1, 0.5), fit, 100, 0, LEFT_S) == 100


def test_a_decode_worker_without_room_computes_no_prompt() -> None:
    late, full, free = PromptPlace(5.0, 1.0), PromptPlace(0.0, 0.1, 1.0, 0.73), PromptPlace(0.0, 0.5)
    assert choose_place(late, [full], 1.0) is None
    assert choose_place(late, [full, free], 1.0) == 1


def test_time_goes_from_the_side_that_has_more_of_it() -> None:
    """The prefill worker takes half of what is left; decode workers help whose steps take less of theirs."""
    busier, freer = PromptPlace(0.0, 0.1, 1.0, 0.6), PromptPlace(0.0, 0.4, 1.0, 0.4)
    assert choose_place(ready(0.5), [busier], LEFT_S) is None
    assert choose_place(ready(0.5), [busier, freer], LEFT_S) == 1
    assert choose_place(ready(0.61), [busier, freer], LEFT_S) == 0
    assert choose_place(ready(2.0), [busier, freer], LEFT_S) == 0, "it is late: nothing to weigh"


def test_a_step_presses_by_what_it_is_of_the_time_that_plans_give_it() -> None:
    most_s = MIX_SHARE * MARGIN * 0.05
    assert PromptPlace(0.0, 0.1, 1.0, pressure_on_streams(0.99 * most_s, 0.05)).has_room
    assert not PromptPlace(0.0, 0.1, 1.0, pressure_on_streams(1.01 * most_s, 0.05)).has_room
    assert pressure_on_streams(None, 0.05) == 0
    assert pressure_on_streams(9.0, None) == 0
