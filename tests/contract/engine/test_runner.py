"""What every model runner must keep, whatever computes. A further engine needs an entry in `RUNNERS`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.model_runner import ModelRunner
from engine.runner.simulated_runner import SimulatedRunner
from splitserve.config.engine import EngineConfig
from tests.support.engine.runner_driver import (
    BLOCK,
    NUM_BLOCKS,
    drive,
    make_sequences,
    prompt_of,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import CONTEXT

MAX_TOKENS = 6
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
PROMPTS = [prompt_of(length) for length in LENGTHS]
OpenRunner = Callable[[Path], ModelRunner]


def open_simulated(folder: Path) -> ModelRunner:
    instant = {"simulated_step_s": 0.0, "simulated_prefill_token_s": 0.0, "simulated_sequence_s": 0.0}
    sizes = {"kind": "simulated", "block_size_tokens": BLOCK, "num_blocks": NUM_BLOCKS}
    return SimulatedRunner(EngineConfig.model_validate({**sizes, **instant}))


def open_torch(folder: Path) -> ModelRunner:
    return runner_of(folder, "llama")


RUNNERS: dict[str, OpenRunner] = {"simulated": open_simulated, "torch": open_torch}


@pytest.fixture(params=list(RUNNERS))
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ModelRunner]]:
    folder, made = tmp_path_factory.getbasetemp() / "tiny", list[ModelRunner]()

    def make_one() -> ModelRunner:
        made.append(RUNNERS[request.param](folder))
        return made[-1]

    yield make_one
    for runner in made:
        runner.close()


@pytest.fixture
def runner(make: Callable[[], ModelRunner]) -> ModelRunner:
    return make()


@pytest.fixture
def expected(make: Callable[[], ModelRunner]) -> list[list[int]]:
    """Each prompt computed alone and in one piece."""
    alone = make()
    return [
        tokens_of(drive(alone, make_sequences([prompt], MAX_TOKENS), MAX_TOKENS, CONTEXT))[0]
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_tokens_depend_neither_on_chunks_nor_on_the_batch(
    runner: ModelRunner, expected: list[list[int]], chunk: int
) -> None:
    assert tokens_of(drive(runner, make_sequences(PROMPTS, MAX_TOKENS), MAX_TOKENS, chunk)) == expected


def test_a_sequence_goes_on_where_its_blocks_were_copied(
    make: Callable[[], ModelRunner], expected: list[list[int]]
) -> None:
    """What a handoff does: bytes of blocks, as `wire` gives them, into other blocks of another runner."""
    source, target = make(), make()
    (sequence,) = make_sequences(PROMPTS[-1:], MAX_TOKENS)
    drive(source, [sequence], 1, CONTEXT)
    memory, blocks = target.kv_memory.region, [block ^ 1 for block in sequence.blocks]
    size = memory.layout.block_bytes
    for block, data in zip(blocks, source.kv_memory.read_blocks(sequence.blocks), strict=True):
        ctypes.memmove(memory.base_address + block * size, bytes(data), size)
    sequence.blocks[:] = blocks
    rest = drive(target, [sequence], MAX_TOKENS - 1, CONTEXT)
    assert sequence.tokens[len(PROMPTS[-1]) :] == expected[-1]
    assert tokens_of(rest) == [expected[-1][1:]]


def test_the_halves_of_a_step_are_the_whole(runner: ModelRunner, expected: list[list[int]]) -> None:
    batch = [sequence.scheduled(CONTEXT) for sequence in make_sequences(PROMPTS, MAX_TOKENS)]
    finish = runner.begin(batch)
    assert [token.token_id for token in finish() if token] == [tokens[0] for tokens in expected]


def test_only_a_finished_prompt_is_sampled(runner: ModelRunner) -> None:
    (sequence,) = make_sequences(PROMPTS[-1:], MAX_TOKENS)
    assert runner.execute([sequence.scheduled(BLOCK)]) == [None]


def test_the_memory_has_the_blocks_of_requests_and_then_those_of_probes(runner: ModelRunner) -> None:
    memory, layout = runner.pool_memory, runner.layout
    assert memory.request_blocks == runner.num_blocks == NUM_BLOCKS
    assert memory.probe_blocks >= 1
    assert memory.layout == layout
    assert layout.block_size_tokens == BLOCK
    assert [data.nbytes for data in runner.read_blocks([0, NUM_BLOCKS - 1])] == [layout.block_bytes] * 2
