"""The simulated model: deterministic, sensitive to KV content, timed by a formula."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.runner.simulated_runner import SimulatedRunner
from splitserve.config.engine import EngineConfig
from tests.support.engine.simulated_tokens import expected_tokens

PROMPT = list(b"a prompt that covers several blocks")


def make_runner(**settings: float) -> SimulatedRunner:
    instant = {"simulated_step_s": 0.0, "simulated_prefill_token_s": 0.0, "simulated_sequence_s": 0.0}
    return SimulatedRunner(
        EngineConfig.model_validate({"block_size_tokens": 4, "num_blocks": 64, **instant, **settings})
    )


def share(
    tokens: list[int], start: int, blocks: list[int], *, num_new: int | None = None
) -> ScheduledSequence:
    count = len(tokens) - start if num_new is None else num_new
    return ScheduledSequence(
        "r", tokens, len(PROMPT), start, count, blocks, start + count == len(tokens), SamplingParams()
    )


def next_token(runner: SimulatedRunner, sequence: ScheduledSequence) -> int:
    (sampled,) = runner.execute([sequence])
    assert sampled is not None
    return sampled.token_id


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_tokens_are_as_expected_for_any_chunking(chunk: int) -> None:
    runner, tokens, blocks = make_runner(), list(PROMPT), [7, 3, 9, 1, 30, 31, 32, 33, 2, 60]
    done = 0
    while done + chunk < len(tokens):
        assert runner.execute([share(tokens, done, blocks, num_new=chunk)]) == [None]
        done += chunk
    for _ in range(4):
        start, done = done, len(tokens)
        tokens.append(next_token(runner, share(tokens, start, blocks)))
    assert tokens[len(PROMPT) :] == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("block", range(9))
def test_one_wrong_byte_in_any_block_changes_the_tokens(block: int) -> None:
    runner, tokens, blocks = make_runner(), list(PROMPT), list(range(12))
    tokens.append(next_token(runner, share(tokens, 0, blocks)))
    runner.pool[block, 8] ^= 1
    for start in range(len(PROMPT), len(PROMPT) + 8):
        tokens.append(next_token(runner, share(tokens, start, blocks)))
    assert tokens[len(PROMPT) :] != expected_tokens(PROMPT, 9)


def test_swapped_blocks_change_the_tokens() -> None:
    runner, tokens = make_runner(), list(PROMPT)
    tokens.append(next_token(runner, share(tokens, 0, list(range(12)))))
    runner.pool[[1, 2]] = runner.pool[[2, 1]]
    for start in range(len(PROMPT), len(PROMPT) + 8):
        tokens.append(next_token(runner, share(tokens, start, list(range(12)))))
    assert tokens[len(PROMPT) :] != expected_tokens(PROMPT, 9)


def test_tokens_are_printable_and_the_memory_address_is_right() -> None:
    tokens = expected_tokens(PROMPT, 500)
    assert all(32 <= token < 127 for token in tokens)
    assert len(set(tokens)) > 60
    assert expected_tokens(PROMPT, 500, eos=tokens[3]) == tokens[: tokens.index(tokens[3]) + 1]
    runner = make_runner()
    memory = runner.pool_memory
    assert memory.base_address % 4096 == 0
    assert runner.pool.shape == (64, runner.layout.block_bytes)
    assert runner.pool.dtype == np.uint8
    assert memory.request_blocks == runner.num_blocks == 64


def test_a_step_takes_the_time_of_the_formula() -> None:
    took_s = []
    for _ in range(5):
        runner = make_runner(simulated_step_s=0.02, simulated_prefill_token_s=0.001)
        began = time.monotonic()
        runner.execute([share(PROMPT, 0, list(range(12)))])
        took_s.append(time.monotonic() - began)
    assert 0.02 + 0.001 * len(PROMPT) <= min(took_s) < 0.5  # the machine may add to some of them


def test_banned_tokens_are_not_chosen() -> None:
    runner, first = make_runner(), expected_tokens(PROMPT, 1)[0]
    sequence = ScheduledSequence(
        "r", PROMPT, len(PROMPT), 0, len(PROMPT), list(range(12)), True, SamplingParams(), frozenset({first})
    )
    assert next_token(runner, sequence) != first
