"""How many prompt tokens a step computes beside streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.scheduler import MIN_PROMPT_TOKENS, PacedStream, prompt_budget
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency

PREFILL = PrefillLatency(0.002, 1e-4)
DECODE = DecodeLatency(0.008, 0.001)
MEASURED = LatencyModel(PREFILL, DECODE)


def test_without_streams_prompts_have_the_whole_step() -> None:
    assert prompt_budget(512, [], MEASURED) == prompt_budget(512, [], LatencyModel()) == 512


@pytest.mark.parametrize("latency", [MEASURED, LatencyModel()])
def test_beside_streams_without_targets_prompts_have_half_of_it(latency: LatencyModel) -> None:
    assert prompt_budget(512, [PacedStream(100), PacedStream(100)], latency) == 256


@pytest.mark.parametrize("latency", [LatencyModel(), LatencyModel(PREFILL), LatencyModel(None, DECODE)])
def test_so_they_have_while_steps_are_unmeasured(latency: LatencyModel) -> None:
    assert prompt_budget(512, [PacedStream(100, 0.05)], latency) == 256


def test_the_strictest_target_of_the_streams_decides() -> None:
    # 30 ms less 10 ms for two streams less 2 ms: 18 ms for 0.1 ms a token.
    assert prompt_budget(512, [PacedStream(100, 0.03), PacedStream(100, 0.2)], MEASURED) in (179, 180)
    assert prompt_budget(512, [PacedStream(100, 0.03), PacedStream(100)], MEASURED) in (179, 180)
    assert prompt_budget(512, [PacedStream(100, 0.2), PacedStream(100)], MEASURED) == 512


def test_a_target_that_decoding_alone_misses_leaves_the_least() -> None:
    assert prompt_budget(512, [PacedStream(100, 0.005)], MEASURED) == MIN_PROMPT_TOKENS
    assert prompt_budget(8, [PacedStream(100, 0.005)], MEASURED) == 8


def test_tokens_after_a_long_context_take_longer() -> None:
    latency = LatencyModel(PrefillLatency(0.0, 1e-4, 1e-7), DECODE)
    streams = [PacedStream(100, 0.05)]
    assert prompt_budget(4096, streams, latency, 10_000) < prompt_budget(4096, streams, latency) / 2


@given(
    step_tokens=st.integers(1, 4096),
    streams=st.lists(
        st.builds(PacedStream, st.integers(1, 10_000), st.none() | st.floats(1e-4, 1.0)),
        min_size=1,
        max_size=8,
    ),
    context=st.integers(0, 10_000),
)
def test_a_step_keeps_the_target_or_computes_the_least(
    step_tokens: int, streams: list[PacedStream], context: int
) -> None:
    tokens = prompt_budget(step_tokens, streams, MEASURED, context)
    assert 1 <= tokens <= step_tokens
    targets = [stream.tpot_s for stream in streams if stream.tpot_s is not None]
    if targets and tokens > MIN_PROMPT_TOKENS:
        step_s = DECODE.decode_step_s(len(streams), sum(stream.context_tokens for stream in streams))
        assert step_s + PREFILL.prefill_s(tokens, context) <= min(targets) + 1e-9
