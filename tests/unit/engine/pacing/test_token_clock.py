"""The token clock: streams keep their targets while prompts are computed beside them, and prompts get on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.pacing.step_time_fit import PromptFit, StepTimeFit
from engine.pacing.token_clock import (
    HELD_S,
    MAX_GAP_S,
    MIN_CHUNK_TOKENS,
    ClockMargin,
    Crowd,
    StreamPace,
    TokenClock,
)

FIT = PromptFit(base_s=5e-3, token_s=1.2e-3, pair_s=1e-7)
ROUNDING_S = 1e-6


@dataclass
class Worker:
    """A worker that computes one endless prompt in chunks, each in a step of its own, beside streams of one target.

    Real steps take `factor` times what the clock is told.
    """

    tpot_s: float
    step_s: float
    streams: int
    answer_tokens: int = 0
    factor: float = 1.0
    now: float = 100.0
    clock: TokenClock = field(init=False)
    prompt_tokens: int = 0
    longest_hold_s: float = 0.0
    missed: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self.clock = TokenClock(self.answer_tokens)
        self.running = [StreamPace(self.tpot_s, self.now, self.now) for _ in range(self.streams)]
        self._chunk_before = False
        self._last_chunk_s = self.now

    def turn(self, *, prompts: bool = True) -> None:
        """A chunk, if one is granted, else a decode step."""
        if prompts:
            granted = self.clock.grant(
                self.now, self.running, self.step_s, FIT, remaining=10_000, context_tokens=0
            )
            if granted:
                self.longest_hold_s = max(self.longest_hold_s, self.now - self._last_chunk_s)
                self.prompt_tokens += granted
                self.now += self.factor * FIT.chunk_s(granted, 0)
                self._last_chunk_s, self._chunk_before = self.now, True
                return
        else:
            self.clock.nothing_waits()
            self._last_chunk_s = self.now
        self.now += self.factor * self.step_s
        if self._chunk_before:
            late = sum(self.clock.is_late(stream, self.now - ROUNDING_S) for stream in self.running)
            self.clock.margin.record(self.now, len(self.running), late)
        self._chunk_before = False
        for stream in self.running:
            stream.emitted(self.now)

    def mean_s(self, stream: StreamPace) -> float:
        return (stream.last_s - stream.first_s) / stream.tokens

    def replace(self, stream: StreamPace) -> None:
        """The stream ends, and another one begins."""
        self.ended += 1
        self.missed += self.mean_s(stream) > self.tpot_s
        self.running.remove(stream)
        self.running.append(StreamPace(self.tpot_s, self.now, self.now))


@settings(max_examples=60, deadline=None)
@given(
    tpot_s=st.floats(0.03, 0.5),
    share=st.floats(0.1, 0.8),
    answer_tokens=st.integers(0, 30),
    quiet_steps=st.integers(0, 50),
)
def test_a_stream_keeps_its_mean_from_l_tokens_on_and_prompts_get_on(
    tpot_s: float, share: float, answer_tokens: int, quiet_steps: int
) -> None:
    """Where steps take what was predicted, and a decode step and the least chunk are shorter than the longest gap."""
    step_s = share * 0.95 * tpot_s
    least_s = FIT.chunk_s(MIN_CHUNK_TOKENS, 0)
    assume(step_s + least_s < MAX_GAP_S and step_s + least_s < HELD_S * (1 - share))
    worker = Worker(tpot_s, step_s, 3, answer_tokens)
    for _ in range(quiet_steps):
        worker.turn(prompts=False)
    for _ in range(400):
        before = worker.running[0].last_s
        worker.turn()
        assert worker.now - before <= MAX_GAP_S + ROUNDING_S
        for stream in worker.running:
            if stream.tokens >= max(answer_tokens, 1):
                assert worker.mean_s(stream) <= tpot_s * (1 + 1e-6)
    assert worker.prompt_tokens >= MIN_CHUNK_TOKENS
    # What a step leaves of its time adds up until a chunk fits; nothing had to be forced.
    assert worker.longest_hold_s <= (least_s + 2 * step_s) / (1 - share)
    assert worker.clock.margin.value == pytest.approx(0.95)


@settings(max_examples=40, deadline=None)
@given(step_s=st.floats(1e-3, 2.0), tpot_s=st.floats(1e-3, 0.5), factor=st.floats(0.5, 2.0))
def test_prompts_are_never_held_for_ever(step_s: float, tpot_s: float, factor: float) -> None:
    """Whatever a step takes, a chunk comes after `HELD_S` and the step under way then, at the latest."""
    worker = Worker(tpot_s, step_s, 2, factor=factor)
    for _ in range(int(8 / (factor * step_s)) + 10):
        worker.turn()
    assert worker.prompt_tokens >= MIN_CHUNK_TOKENS
    assert worker.longest_hold_s <= HELD_S + 2 * factor * step_s + ROUNDING_S


@pytest.mark.parametrize("factor", [1 / 1.5, 1.0, 1.5])
@pytest.mark.parametrize("answers", [(24, 48), (64, 200)])
def test_targets_hold_with_rates_wrong_by_half_either_way(factor: float, answers: tuple[int, int]) -> None:
    chance = random.Random(1)
    worker = Worker(0.05, 0.018, 8, factor=factor)
    lengths = {id(stream): chance.randint(*answers) for stream in worker.running}
    while worker.ended < 1000:
        worker.turn(
            prompts=worker.now % 4 < 3
        )  # prompts come in bursts, so that streams get ahead in between
        for stream in list(worker.running):
            if stream.tokens >= lengths[id(stream)]:
                worker.replace(stream)
                lengths[id(worker.running[-1])] = chance.randint(*answers)
    assert worker.missed <= 0.01 * worker.ended
    assert worker.prompt_tokens > 0


def test_the_due_times() -> None:
    clock = TokenClock(answer_tokens=20)
    stream = StreamPace(0.1, first_s=10.0, last_s=10.0)
    assert clock.due_s(stream) == pytest.approx(10 + 0.1 * (0.95 + 0.05 * 20))
    stream.tokens = 100
    assert clock.due_s(stream) == 10.0 + MAX_GAP_S  # it is far ahead


def test_a_token_is_late_by_its_target_not_by_the_margin() -> None:
    clock, stream = TokenClock(), StreamPace(0.1, first_s=10.0, last_s=10.2, tokens=2)
    assert clock.due_s(stream) == pytest.approx(10.285)
    assert not clock.is_late(stream, 10.29)
    assert clock.is_late(stream, 10.31)


def test_too_few_tokens_are_none_unless_the_prompt_ends_with_them() -> None:
    fit, stream = PromptFit(0.0, 1e-3, 0.0), StreamPace(1.0, 10.0, 10.0)
    now, step_s = 10 + MAX_GAP_S - 0.02 - 0.0205, 0.02
    grant = TokenClock().grant
    assert grant(now, [stream], step_s, fit, remaining=21, context_tokens=0) == 0
    assert grant(now, [stream], step_s, fit, remaining=20, context_tokens=0) == 20


def test_mixing_costs_room() -> None:
    fit, stream = PromptFit(0.0, 1e-3, 0.0, mixing_s=0.05), StreamPace(1.0, 10.0, 10.0)
    now = 10 + MAX_GAP_S - 0.02 - 0.1005
    alone = TokenClock().grant(now, [stream], 0.02, fit, remaining=500, context_tokens=0)
    mixed = TokenClock().grant(now, [stream], 0.02, fit, remaining=500, context_tokens=0, mixed=True)
    assert (alone, mixed) == (100, 50)


def test_the_margin_falls_with_late_tokens_and_comes_back() -> None:
    margin = ClockMargin()
    margin.record(0.0, 100, 2)
    margin.record(10.0, 0, 0)
    assert margin.value == pytest.approx(0.90)
    for window in range(2, 5):
        margin.record(10.0 * window, 100, 1)
    assert margin.value == pytest.approx(0.93)
    for window in range(5, 40):
        margin.record(10.0 * window, 100, 50)
    assert margin.value == 0.5
    for window in range(40, 140):
        margin.record(10.0 * window, 0, 0)
    assert margin.value == 0.95


SLOW_BEFORE = {
    "steps like those that come": [(4, 1000)] * 200,
    "few of them": [(4, 1000)] * 20,
    "fewer streams, and none like those that come": [(2, 600), (3, 800)] * 50,
}


@pytest.mark.parametrize("slow", SLOW_BEFORE.values(), ids=SLOW_BEFORE)
@pytest.mark.parametrize("fast", [0, 8])
def test_a_belief_that_decoding_alone_is_late_is_found_out(slow: list[tuple[int, int]], fast: int) -> None:
    """Steps took 0.4 s while others had the cores, after a few fast ones. Prompts that never end are mixed with all."""
    clock, steps = TokenClock(), StepTimeFit()
    for _ in range(fast):
        steps.record(1, 100, 0.012)
        steps.record(4, 400, 0.012)
    for sequences, context_tokens in slow:
        steps.record(sequences, context_tokens, 0.4)
    steps.refit()

    def step(now: float) -> float:
        assert steps.latest is not None
        step_s = steps.latest.step_s(5, 1500)
        tokens = clock.grant(now, [stream], step_s, FIT, remaining=10**6, context_tokens=0, mixed=True)
        if not tokens:
            steps.record(5, 1500, 0.02)
        stream.emitted(now + 0.02 + FIT.chunk_s(tokens, 0))
        return stream.last_s

    now, stream = 100.0, StreamPace(0.05, 100.0, 100.0)
    while now < 125:
        now = step(now)
    stream = StreamPace(0.05, now, now)
    for _ in range(100):
        now = step(now)
    assert (now - stream.first_s) / 100 <= 0.05


def test_beside_a_stream_that_is_late_in_any_case_the_least_chunk_may_be_longer_than_a_step() -> None:
    """Otherwise one client with a tight target would hold back all prompts."""
    least_s = FIT.chunk_s(MIN_CHUNK_TOKENS, 0)
    tight, others = StreamPace(0.01, 10.0, 10.0), [StreamPace(10 * least_s, 10.0, 10.0)] * 3
    for streams in ([tight], [tight, *others]):
        tokens = TokenClock().grant(
            10.0, streams, least_s / 3, FIT, remaining=500, context_tokens=0, crowd=Crowd(least_s / 3, 0.005)
        )
        assert tokens == (MIN_CHUNK_TOKENS if len(streams) > 1 else 0)


@pytest.mark.parametrize("step_s", [0.06, 0.1, 0.2, 0.4])
def test_beside_streams_that_are_late_in_any_case_one_step_in_four_is_theirs(step_s: float) -> None:
    clock, stream, now, alone = TokenClock(), StreamPace(0.05, 10.0, 10.0), 10.0, 0
    shares = []
    while stream.tokens < 100:
        tokens = clock.grant(now, [stream], step_s, FIT, remaining=10**6, context_tokens=0, mixed=True)
        alone += not tokens
        chunk_s = FIT.chunk_s(tokens, 0)
        shares.append(chunk_s / step_s)
        now += chunk_s + step_s
        assert now - stream.last_s <= max(MAX_GAP_S, step_s) + ROUNDING_S
        stream.emitted(now)
    assert alone == 25
    assert max(shares) == pytest.approx(min(1.0, MAX_GAP_S / step_s - 1), rel=0.05)
