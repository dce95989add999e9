"""When a draft model reads a prompt, and how much of it in a step."""

from __future__ import annotations

import math

import pytest

from engine.speculation.draft_lengths import NOTHING_OWED, Share
from engine.speculation.prompt_reading import (
    MAX_CHUNK,
    MAX_STEPS,
    MIN_CHUNK,
    ahead_s,
    chunk_tokens,
    pays,
    steps_to_read,
)


def test_an_answer_is_expected_to_go_on_for_as_long_as_it_has() -> None:
    assert pays(behind_s=0.1, emitted=51, further=1000, saved_s=0.002, waits=0)
    assert not pays(behind_s=0.1, emitted=49, further=1000, saved_s=0.002, waits=0)
    assert not pays(behind_s=0.1, emitted=500, further=40, saved_s=0.002, waits=0)
    assert not pays(behind_s=0.1, emitted=500, further=500, saved_s=0.0, waits=0)
    assert not pays(behind_s=0.1, emitted=100, further=500, saved_s=0.002, waits=60)
    assert not pays(behind_s=0.1, emitted=10**6, further=10**6, saved_s=0.002, waits=math.inf)


def test_reading_takes_the_steps_in_which_streams_get_ahead() -> None:
    assert steps_to_read(0.1, 0.1, 0.0) == 0.0
    assert steps_to_read(0.3, 0.1, 0.01) == pytest.approx(20)
    assert steps_to_read(0.3, 0.1, 0.0) == math.inf


def test_what_streams_are_ahead_may_be_taken_and_no_more() -> None:
    owed = Share(0.97, 0.0)
    assert ahead_s([owed], math.inf, 1.0) == pytest.approx(0.03 / 0.97)
    assert ahead_s([owed, owed._replace(credit=1.94)], math.inf, 1.0) == pytest.approx(0.03 / 0.97)
    assert ahead_s([owed._replace(credit=0.97)], math.inf, 1.0) == pytest.approx(1 / 0.97)
    assert ahead_s([owed._replace(credit=-1.0)], math.inf, 1.0) == 0.0
    assert ahead_s([NOTHING_OWED], 1.5, 0.02) == pytest.approx(0.01)
    assert ahead_s([NOTHING_OWED], 0.8, 0.02) == 0.0
    assert ahead_s([NOTHING_OWED], math.inf, 0.0) == 0.0


def test_chunks_fit_and_are_not_too_small() -> None:
    chunk_s = MIN_CHUNK * 0.001
    assert chunk_tokens(500, chunk_s, 0.1, 1.0) == 100
    assert chunk_tokens(500, chunk_s, 0.1, 0.05 / MAX_STEPS) == 50
    assert chunk_tokens(500, chunk_s, 0.031, 1.0) == 0
    assert chunk_tokens(20, chunk_s, 0.021, 1.0) == 20
    assert chunk_tokens(500, chunk_s, math.inf, 1.0) == MAX_CHUNK
    assert chunk_tokens(500, 0.0, 0.0, 0.0) == MIN_CHUNK
