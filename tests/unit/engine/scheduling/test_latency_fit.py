"""The fitted time of steps: correct where steps differ, without slopes where they do not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.workers.registration import check_report
from engine.scheduling.step_times import MAX_RETRY_S, MIN_RETRY_S, LatencyFit, StepMeter, StepPart, StepTokens
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency, attention_pairs
from splitserve.v1 import registry_pb2

BASE_S, SEQUENCE_S, TOKEN_S = 8e-3, 2e-4, 1e-6


def cost(sequences: int, context: int) -> float:
    return BASE_S + SEQUENCE_S * sequences + TOKEN_S * context


def record_decode(fit: LatencyFit, sequences: int, context: int, duration_s: float) -> None:
    fit.record(StepTokens(sequences, context, 0, 0.0), duration_s)


def decodes(steps: list[tuple[int, int, float]]) -> DecodeLatency | None:
    fit = LatencyFit()
    for step in steps:
        record_decode(fit, *step)
    return fit.model.decode


def varied(noise: float, seed: int = 1) -> list[tuple[int, int, float]]:
    chance = random.Random(seed)
    steps = []
    for _ in range(400):
        sequences = chance.randint(1, 40)
        context = sum(chance.randint(50, 2000) for _ in range(sequences)) + chance.randint(0, 20000)
        steps.append((sequences, context, cost(sequences, context) * chance.gauss(1, noise)))
    return steps


def test_a_few_decode_steps_give_no_fit() -> None:
    assert decodes([(1, 10, 0.01)] * 15) is None


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.03, 0.25)])
def test_costs_are_found_where_steps_differ(noise: float, tolerance: float) -> None:
    fit = decodes(varied(noise))
    assert fit is not None
    assert fit.base_s == pytest.approx(BASE_S, rel=tolerance)
    assert fit.sequence_s == pytest.approx(SEQUENCE_S, rel=2 * tolerance)
    assert fit.context_token_s == pytest.approx(TOKEN_S, rel=tolerance)


def test_equal_steps_give_a_base_alone() -> None:
    fit = decodes([(4, 800, 0.02)] * 64)
    assert fit is not None
    assert (fit.base_s, fit.sequence_s, fit.context_token_s) == (pytest.approx(0.02), 0.0, 0.0)


def test_correlated_inputs_get_one_slope() -> None:
    steps = [(n, 500 * n, cost(n, 500 * n)) for n in range(1, 33)] * 4
    fit = decodes(steps)
    assert fit is not None
    assert fit.context_token_s == 0.0
    assert fit.base_s + fit.sequence_s * 20 == pytest.approx(cost(20, 10000), rel=1e-6)


def test_context_alone_gets_its_slope() -> None:
    fit = decodes([(8, context, cost(8, context)) for context in range(1000, 65000, 1000)])
    assert fit is not None
    assert fit.sequence_s == 0.0
    assert fit.context_token_s == pytest.approx(TOKEN_S, rel=1e-6)


def test_a_long_time_at_one_load_forgets_nothing() -> None:
    fit = decodes([*varied(0.0), *[(8, 8000, cost(8, 8000))] * 20_000])
    assert fit is not None
    assert fit.base_s + fit.sequence_s * 32 + fit.context_token_s * 32000 == pytest.approx(
        cost(32, 32000), rel=0.02
    )


def test_costs_are_never_negative_and_a_frozen_step_hardly_counts() -> None:
    falling = decodes([(n, 100, 0.05 - 0.001 * n) for n in range(1, 33)] * 2)
    assert falling is not None
    assert min(falling.base_s, falling.sequence_s, falling.context_token_s) >= 0
    steps = varied(0.0)
    frozen = decodes([*steps, (20, 20000, 600.0), *steps[:15]])
    assert frozen is not None
    assert frozen.base_s + frozen.sequence_s * 20 + frozen.context_token_s * 20000 < 2 * cost(20, 20000)


PROMPT = PrefillLatency(8e-3, 1.2e-3, 4e-7)


def fitted(noise: float, *, stopped_every: int = 0) -> PrefillLatency:
    """The fit after 400 chunks of PROMPT's cost; one in `stopped_every` was stopped for a minute."""
    chance, fit = random.Random(1), LatencyFit()
    for step in range(400):
        tokens, context = chance.randint(8, 512), chance.choice((0, 0, 512, 2048, 4096))
        duration_s = PROMPT.prefill_s(tokens, context) * chance.gauss(1, noise)
        if stopped_every and step % stopped_every == stopped_every - 1:
            duration_s += 60.0
        fit.record(StepTokens(0, 0, tokens, attention_pairs(tokens, context)), duration_s)
    assert fit.model.prefill is not None
    return fit.model.prefill


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.03, 0.1)])
def test_costs_are_found_where_chunks_differ(noise: float, tolerance: float) -> None:
    found = fitted(noise)
    assert found.token_s == pytest.approx(PROMPT.token_s, rel=tolerance)
    assert found.pair_s == pytest.approx(PROMPT.pair_s, rel=2 * tolerance)
    assert found.prefill_s(300, 1000) == pytest.approx(PROMPT.prefill_s(300, 1000), rel=tolerance)


def test_a_process_that_was_stopped_hardly_counts() -> None:
    found = fitted(0.02, stopped_every=80)
    for tokens, context in ((32, 0), (256, 0), (512, 4096)):
        assert found.prefill_s(tokens, context) == pytest.approx(PROMPT.prefill_s(tokens, context), rel=0.35)


def test_the_first_step_of_a_size_counts_for_nothing() -> None:
    fit = LatencyFit()
    fit.record(StepTokens(0, 0, 100, 5000), 5.0)
    for _ in range(4):
        fit.record(StepTokens(0, 0, 100, 5000), 0.1)
    assert fit.model.prefill == PrefillLatency(0.0, pytest.approx(1e-3), 0.0)


def test_a_few_steps_give_no_fit() -> None:
    fit = LatencyFit()
    for _ in range(4):
        fit.record(StepTokens(0, 0, 100, 5000), 0.1)
    assert fit.model.prefill is None
    fit.record(StepTokens(0, 0, 100, 5000), 0.0)
    assert fit.model.prefill is None


LARGE, SMALL = (32, 32_000), (4, 4000)


class Machine:
    """Records decode steps of a machine that takes `slow` times as long as alone, with noise."""

    def __init__(self, seed: int = 1) -> None:
        self.fit, self.slow = LatencyFit(), 1.0
        self.chance = random.Random(seed)

    def cost(self, sequences: int, context: int) -> float:
        return self.slow * (BASE_S + SEQUENCE_S * sequences + TOKEN_S * context)

    def step(self, sequences: int, context: int | None = None) -> None:
        if context is None:
            context = sum(self.chance.randint(50, 2000) for _ in range(sequences))
        noise = self.chance.gauss(1, 0.05) * (1.5 if self.chance.random() < 0.03 else 1.0)
        record_decode(self.fit, sequences, context, self.cost(sequences, context) * max(noise, 0.5))

    def steps(self, count: int, least: int, most: int) -> None:
        for _ in range(count):
            self.step(self.chance.randint(least, most))

    def error(self, sequences: int, context: int) -> float:
        """What the fit says, as a multiple of what such a step takes."""
        assert self.fit.model.decode is not None
        return self.fit.model.decode.decode_step_s(sequences, context) / self.cost(sequences, context)


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
TRUE = PrefillLatency(0.04, 0.53e-3)
COLD_TOKEN_S = 1.3e-3


def chunks(cold: int, count: int, seed: int) -> list[tuple[int, float]]:
    """Tokens and seconds of chunks of 100 to 300 tokens, of which the first `cold` were slow."""
    chance, found = random.Random(seed), []
    for number in range(cold + count):
        tokens = chance.randint(100, 300)
        token_s = COLD_TOKEN_S if number < cold else TRUE.token_s
        found.append((tokens, (TRUE.base_s + token_s * tokens) * chance.uniform(0.95, 1.05)))
    return found


def excess(fit: LatencyFit) -> float:
    """By how much the fit is off where it is off the most, among the lengths that came."""
    assert fit.model.prefill is not None
    return max(
        abs(fit.model.prefill.prefill_s(tokens, 0) / TRUE.prefill_s(tokens, 0) - 1)
        for tokens in (100, 150, 200, 300)
    )


def test_slow_chunks_of_the_first_seconds_are_forgotten_soon() -> None:
    """The fit was off by more than a quarter for some 60 chunks."""
    late = []
    for seed in range(12):
        fit, wrong = LatencyFit(), 0
        for number, (tokens, duration_s) in enumerate(chunks(10, 90, seed)):
            fit.record(StepTokens(0, 0, tokens, attention_pairs(tokens, 0)), duration_s)
            if fit.model.prefill is not None and excess(fit) > 0.25:
                wrong = number + 1
        late.append(wrong - 10)
    assert sorted(late)[len(late) // 2] <= 12
    assert max(late) <= 30


@settings(deadline=None, max_examples=25)
@given(cold=st.integers(0, 12), seed=st.integers(0, 1000))
def test_however_many_were_slow_the_fit_ends_at_what_chunks_take(cold: int, seed: int) -> None:
    fit = LatencyFit()
    for tokens, duration_s in chunks(cold, 60, seed):
        fit.record(StepTokens(0, 0, tokens, attention_pairs(tokens, 0)), duration_s)
    assert excess(fit) < 0.25


def test_a_first_chunk_during_which_the_process_was_stopped_is_displaced() -> None:
    fit = LatencyFit()
    for tokens, duration_s in ((100, 0.1), (100, 60.0), *[(100, 0.1)] * 6):
        fit.record(StepTokens(0, 0, tokens, attention_pairs(tokens, 0)), duration_s)
    assert fit.model.prefill is not None
    assert fit.model.prefill.prefill_s(100, 0) == pytest.approx(0.1)


def test_a_shorter_chunk_of_a_size_displaces_nothing() -> None:
    """A bucket's lengths differ by a factor of two."""
    fit = LatencyFit()
    for tokens in (255, 255, 128, 255, 128):
        fit.record(StepTokens(0, 0, tokens, attention_pairs(255, 0)), 1e-3 * tokens)
    assert fit.model.prefill is not None
    assert fit.model.prefill.prefill_s(255, 0) == pytest.approx(0.255)


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 10_000), st.integers(0, 10**9), st.floats(1e-9, 1e9)),
        min_size=16,
        max_size=200,
    )
)
def test_whatever_is_recorded_costs_are_finite_and_not_negative(steps: list[tuple[int, int, float]]) -> None:
    fit = LatencyFit()
    for sequences, context, duration_s in steps:
        record_decode(fit, sequences, context, duration_s)
    assert fit.model.decode is not None
    costs = (fit.model.decode.base_s, fit.model.decode.sequence_s, fit.model.decode.context_token_s)
    assert all(0 <= cost < float("inf") for cost in costs)


def test_what_prompts_add_to_steps_that_decode_counts_as_theirs() -> None:
    """A worker with streams seldom has a step for prompts alone."""
    fit, chance = LatencyFit(), random.Random(1)
    fit.record(StepTokens(1, 100, 64, attention_pairs(64, 0)), 5.0)
    assert fit.model.prefill is None, "what decoding takes is not known yet"
    for _ in range(16):
        record_decode(fit, 1, 100, 0.02)
    for _ in range(400):
        tokens, context = chance.randint(8, 256), chance.choice((0, 0, 512, 2048))
        fit.record(
            StepTokens(1, 100, tokens, attention_pairs(tokens, context)),
            0.02 + PROMPT.prefill_s(tokens, context),
        )
    assert fit.model.prefill is not None
    assert fit.model.prefill_s(100, 500) == pytest.approx(PROMPT.prefill_s(100, 500), rel=0.01)
    assert fit.model.decode_step_s(1, 100) == pytest.approx(0.02)


NO_TIMES = (0.0, -1.0, -math.inf, math.inf, math.nan)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0, 3.0, 5.0])
def test_noise_of_any_size_leaves_figures_that_can_be_calculated_with(sigma: float) -> None:
    """10,000 steps of all kinds with log-normal noise, and clocks that jump. A fit fed back to itself once collapsed to
    1e-20 s a token, and a square root of a negative number ended the engine."""
    chance, meter, longest_s = random.Random(sigma), StepMeter(), 0.0
    now = 0.0
    for number in range(10_000):
        streams, prompt = chance.choice(((0, 1), (1, 0), (4, 0), (20, 0), (4, 1), (20, 1)))
        parts = [StepPart(chance.randint(10, 4000), 1) for _ in range(streams)]
        parts += [StepPart(chance.choice((0, 512)), chance.randint(2, 512))] * prompt
        size = StepTokens.of(parts)
        true_s = cost(streams, size.decode_context_tokens) if streams else 0.0
        true_s += PROMPT.seconds(size.prompt_tokens, size.pairs) if prompt else 0.0
        measured_s = (
            NO_TIMES[number % 5] if chance.random() < 0.02 else true_s * chance.lognormvariate(0, sigma)
        )
        longest_s = max(longest_s, measured_s if math.isfinite(measured_s) else 0.0)
        meter.begin(now)
        expected_s = meter.expect(parts)
        assert expected_s is None or 0 < expected_s < math.inf
        meter.end(now + measured_s, more=False)
        assert MIN_RETRY_S <= meter.retry_after_s(chance.randint(0, 10**6)) <= MAX_RETRY_S
        require_usable(meter.latency.model, max(longest_s, 1e-6))
    model = meter.latency.model
    assert model.prefill is not None
    assert model.decode is not None
    if sigma <= 0.5:
        assert model.prefill.prefill_s(300, 500) == pytest.approx(PROMPT.prefill_s(300, 500), rel=0.5)
        assert model.decode.decode_step_s(10, 20_000) == pytest.approx(cost(10, 20_000), rel=0.5)


def require_usable(model: LatencyModel, longest_s: float) -> None:
    """Figures are finite and neither negative nor nearly nothing, and none is above the longest step."""
    if (prompt := model.prefill) is not None:
        assert 1e-11 < prompt.token_s <= longest_s
        assert 0 <= prompt.base_s <= longest_s
        assert 0 <= prompt.pair_s <= longest_s
        for seconds in (-1.0, 0.0, 1e-3, 1.0):
            assert 0 <= prompt.tokens_within(seconds, 1000) < 10**12
    if (step := model.decode) is not None:
        assert 1e-9 < step.base_s + step.sequence_s <= longest_s
        assert 0 <= step.context_token_s <= longest_s
    check_report(registry_pb2.ReportRequest(load=registry_pb2.WorkerLoad(latency=model.to_proto())))
