"""Fits follow a machine that gets faster or slower, in sizes too that do not come any more; and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pacing.step_time_fit import PromptFit, PromptTimeFit, StepTimeFit, pairs_of

BASE_S, SEQUENCE_S, TOKEN_S = 8e-3, 2e-4, 1e-6
LARGE = 32, 32_000
SMALL = 4, 4000


class Machine:
    """Records decode steps of a machine that takes `slow` times as long as alone, with noise."""

    def __init__(self, seed: int = 1) -> None:
        self.fit, self.slow = StepTimeFit(), 1.0
        self.chance = random.Random(seed)

    def cost(self, sequences: int, context: int) -> float:
        return self.slow * (BASE_S + SEQUENCE_S * sequences + TOKEN_S * context)

    def step(self, sequences: int, context: int | None = None) -> None:
        if context is None:
            context = sum(self.chance.randint(50, 2000) for _ in range(sequences))
        noise = self.chance.gauss(1, 0.05) * (1.5 if self.chance.random() < 0.03 else 1.0)
        self.fit.record(sequences, context, self.cost(sequences, context) * max(noise, 0.5))

    def steps(self, count: int, least: int, most: int) -> None:
        for _ in range(count):
            self.step(self.chance.randint(least, most))

    def error(self, sequences: int, context: int) -> float:
        """What the fit says, as a multiple of what such a step takes."""
        assert self.fit.latest is not None
        return self.fit.latest.step_s(sequences, context) / self.cost(sequences, context)


@pytest.mark.parametrize("factor", [0.4, 0.5, 2.0, 2.5])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 5), (1, 8)])
def test_a_batch_that_does_not_come_any_more_follows_those_that_do(
    factor: float, sizes: tuple[int, int]
) -> None:
    machine = Machine()
    machine.steps(400, 1, 40)
    machine.slow = factor
    machine.steps(400, *sizes)
    assert 1 / 1.6 < machine.error(*LARGE) < 1.6, "contexts are others, too, which may be some of the change"
    assert machine.error(*SMALL) == pytest.approx(1.0, abs=0.2)


@settings(deadline=None, max_examples=25)
@given(factor=st.floats(0.35, 3.0), most=st.integers(1, 12), seed=st.integers(0, 1000))
def test_a_change_of_the_machine_is_followed_and_undone(factor: float, most: int, seed: int) -> None:
    machine = Machine(seed)
    machine.steps(300, 1, 40)
    before = machine.error(*LARGE)
    machine.slow = factor
    machine.steps(500, 1, most)
    assert 1 / 1.6 < machine.error(*LARGE) < 1.6
    machine.slow = 1.0
    # A bucket remembers 64 steps of its own, and one of a few sizes is not in every step.
    machine.steps(750, 1, most)
    assert machine.error(*LARGE) == pytest.approx(before, rel=0.35)


def test_three_short_contexts_before_a_change_do_not_hide_it() -> None:
    """Three steps of one sequence with little context were all there were of the only size that comes afterwards. The
    context's growth could tell a factor of two, were its slope not bounded by what larger batches take."""
    machine = Machine()
    for _ in range(3):
        machine.step(1, 300)
    machine.steps(300, 2, 40)
    machine.slow = 2.0
    machine.steps(500, 1, 1)
    assert 1 / 1.6 < machine.error(*LARGE) < 1.6


@pytest.mark.parametrize("most", [1, 3, 8])
def test_without_a_change_the_only_large_batches_stay(most: int) -> None:
    machine = Machine()
    machine.steps(400, 1, 40)
    for _ in range(10):
        machine.steps(600, 1, most)
        assert machine.error(*LARGE) == pytest.approx(1.0, abs=0.12)


def test_one_large_batch_stays_where_only_one_other_size_comes() -> None:
    machine = Machine()
    for _ in range(40):
        machine.step(*LARGE)
    for _ in range(5000):
        machine.step(1, 500)
    assert machine.error(*LARGE) == pytest.approx(1.0, abs=0.12)


def test_longer_contexts_are_no_slower_machine() -> None:
    """At first contexts grow with the batch, so that they have no slope of their own."""
    machine = Machine()
    for _ in range(300):
        sequences = machine.chance.randint(1, 40)
        machine.step(sequences, 500 * sequences)
    for step in range(2000):
        machine.step(4, 2000 + 40 * step)
    assert machine.error(*LARGE) == pytest.approx(1.0, abs=0.15)
    assert machine.error(*SMALL) == pytest.approx(1.0, abs=0.15)


def test_a_batch_seen_only_while_the_machine_was_busy_loses_weight() -> None:
    """No other size tells of that time, so nothing can be followed."""
    machine = Machine()
    machine.steps(200, 1, 7)
    machine.slow = 2.0
    machine.steps(20, 24, 40)
    machine.slow = 1.0
    found = []
    for _ in range(3):
        machine.steps(800, 1, 7)
        found.append(machine.error(16, 16_000))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1.6
    assert machine.error(*SMALL) < 1.2


# A prefill worker as it was seen: 40 ms and 0.53 ms a token; in its first seconds 1.3 ms a token.
TRUE = PromptFit(0.04, 0.53e-3, 0.0)
COLD_TOKEN_S = 1.3e-3


def chunks(cold: int, count: int, seed: int) -> list[tuple[int, float]]:
    """Tokens and seconds of chunks of 100 to 300 tokens, of which the first `cold` were slow."""
    chance, found = random.Random(seed), []
    for number in range(cold + count):
        tokens = chance.randint(100, 300)
        token_s = COLD_TOKEN_S if number < cold else TRUE.token_s
        found.append((tokens, (TRUE.base_s + token_s * tokens) * chance.uniform(0.95, 1.05)))
    return found


def excess(fit: PromptTimeFit) -> float:
    """By how much the fit is off where it is off the most, among the lengths that came."""
    assert fit.latest is not None
    return max(
        abs(fit.latest.chunk_s(tokens, 0) / TRUE.chunk_s(tokens, 0) - 1) for tokens in (100, 150, 200, 300)
    )


def test_slow_chunks_of_the_first_seconds_are_forgotten_soon() -> None:
    """The fit was off by more than a quarter for some 60 chunks."""
    late = []
    for seed in range(12):
        fit, wrong = PromptTimeFit(), 0
        for number, (tokens, duration_s) in enumerate(chunks(10, 90, seed)):
            fit.record(tokens, pairs_of(tokens, 0), duration_s)
            if fit.latest is not None and excess(fit) > 0.25:
                wrong = number + 1
        late.append(wrong - 10)
    assert sorted(late)[len(late) // 2] <= 12
    assert max(late) <= 30


@settings(deadline=None, max_examples=25)
@given(cold=st.integers(0, 12), seed=st.integers(0, 1000))
def test_however_many_were_slow_the_fit_ends_at_what_chunks_take(cold: int, seed: int) -> None:
    fit = PromptTimeFit()
    for tokens, duration_s in chunks(cold, 60, seed):
        fit.record(tokens, pairs_of(tokens, 0), duration_s)
    assert excess(fit) < 0.25


def test_a_first_chunk_during_which_the_process_was_stopped_is_displaced() -> None:
    fit = PromptTimeFit()
    for tokens, duration_s in ((100, 0.1), (100, 60.0), *[(100, 0.1)] * 6):
        fit.record(tokens, pairs_of(tokens, 0), duration_s)
    assert fit.latest is not None
    assert fit.latest.chunk_s(100, 0) == pytest.approx(0.1)


def test_a_shorter_chunk_of_a_size_displaces_nothing() -> None:
    """A bucket's lengths differ by a factor of two."""
    fit = PromptTimeFit()
    for tokens in (255, 255, 128, 255, 128):
        fit.record(tokens, pairs_of(255, 0), 1e-3 * tokens)
    assert fit.latest is not None
    assert fit.latest.chunk_s(255, 0) == pytest.approx(0.255)


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 10_000), st.integers(0, 10**9), st.floats(1e-9, 1e9)),
        min_size=16,
        max_size=200,
    )
)
def test_whatever_is_recorded_costs_are_finite_and_not_negative(steps: list[tuple[int, int, float]]) -> None:
    fit = StepTimeFit()
    for sequences, context, duration_s in steps:
        fit.record(sequences, context, duration_s)
    assert fit.latest is not None
    costs = (fit.latest.base_s, fit.latest.sequence_s, fit.latest.context_token_s)
    assert all(0 <= cost < float("inf") for cost in costs)


def test_a_few_steps_in_a_row_displace_many_slow_ones_at_once_and_single_ones_do_not() -> None:
    fit = StepTimeFit()
    for _ in range(640):
        fit.record(4, 1000, 0.4)
    for _ in range(10):
        for _ in range(7):
            fit.record(4, 1000, 0.02)
        fit.record(4, 1000, 0.4)
    assert fit.latest is not None
    assert fit.latest.step_s(4, 1000) > 0.05, "seven of eight steps are short, never eight in a row"
    for _ in range(8):
        fit.record(4, 1000, 0.02)
    assert fit.latest.step_s(4, 1000) == pytest.approx(0.02), "without waiting for the next regular fit"


@pytest.mark.parametrize("slow_s", [0.04, 0.055])
def test_a_neighbour_that_comes_and_goes_leaves_the_mean(slow_s: float) -> None:
    fit, chance, seen = StepTimeFit(), random.Random(3), []
    for turn in range(200):
        for _ in range(chance.randint(8, 14)):
            fit.record(4, 1000, 0.02 if turn % 2 else slow_s)
        if turn > 20 and fit.latest is not None:
            seen.append(fit.latest.step_s(4, 1000))
    middle_s = (0.02 + slow_s) / 2
    assert 0.8 * middle_s < min(seen) <= max(seen) < 1.2 * middle_s
