"""The engine on a GPU: kernels, CUDA graphs and transfers against the same model in plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.cuda.forward import CudaForward
from engine.core.model_runner import SamplingParams
from engine.runner.torch_runner import TorchRunner
from tests.support.engine.runner_driver import (
    BLOCK,
    GREEDY,
    NUM_BLOCKS,
    Sequence_,
    check_broken_kv_fails_alone,
    check_halves,
    check_prompt_logprobs,
    drive,
    make_sequences,
    prompt_of,
    reference,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import CONTEXT, EOS, FAMILIES, WINDOW

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),  # kernels are compiled on first use
]
LENGTHS = [1, BLOCK, BLOCK + 1, WINDOW + 1, 3 * WINDOW + 5, 100]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tiny"


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def cuda_runner(folder: Path, family: str, dtype: str = "float32", **settings: int | str) -> TorchRunner:
    runner = runner_of(folder, family, dtype, device="cuda:0", **settings)
    assert isinstance(runner._forward, CudaForward) == (settings.get("attention_backend") != "torch")
    runner._pool.tensor.fill_(float("nan"))
    return runner


def graph_sizes(runner: TorchRunner) -> list[int]:
    assert isinstance(runner._forward, CudaForward)
    graphs = runner._forward._graphs
    return graphs.captured if graphs is not None else []


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(folder: Path, family: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = reference(folder, family, prompts, 8)
    runner = cuda_runner(folder, family)
    for chunk in (BLOCK + 1, CONTEXT):
        assert tokens_of(drive(runner, make_sequences(prompts, 8), 8, chunk)) == expected, f"chunk {chunk}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_logits_are_close_to_those_in_torch(folder: Path, family: str) -> None:
    """In bfloat16 tokens may differ, logits only by rounding."""
    sequences = make_sequences([prompt_of(length) for length in LENGTHS], 1, stagger=0)
    found = {}
    for backend in ("torch", "triton"):
        runner = cuda_runner(folder, family, "bfloat16", attention_backend=backend, cuda_graphs="off")
        with torch.inference_mode():
            step = runner._forward.logits([sequence.scheduled(CONTEXT) for sequence in sequences])
            # In the order of the batch.
            found[backend] = step.values[torch.tensor(step.order).argsort()].float().cpu()
        runner.close()
    difference = torch.linalg.vector_norm(found["torch"] - found["triton"])
    assert difference < 0.03 * torch.linalg.vector_norm(found["torch"])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_steps_equal_eager_ones(folder: Path, family: str) -> None:
    """Batches of every size up to the largest, with and without rows to fill up."""
    eager = cuda_runner(folder, family, cuda_graphs="off")
    replayed = cuda_runner(folder, family, max_running_requests=18)
    assert graph_sizes(replayed) == [1, 2, 4, 8, 16, 32]
    for rows in (1, 2, 3, 7, 16, 18):
        prompts = [prompt_of(5 + index, seed=rows) for index in range(rows)]
        answers = [
            tokens_of(drive(runner, make_sequences(prompts, 4, stagger=0), 4, CONTEXT))
            for runner in (eager, replayed)
        ]
        assert answers[0] == answers[1], f"{rows} rows"


def test_padded_rows_touch_no_block(folder: Path) -> None:
    runner = cuda_runner(folder, "llama")
    sequences = make_sequences([prompt_of(9), prompt_of(4), prompt_of(5)], 3, stagger=0)
    drive(runner, sequences, 3, CONTEXT)
    used = sorted(block for sequence in sequences for block in sequence.blocks)
    others = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    others[used] = False
    assert runner._pool.tensor[others.nonzero().squeeze(1).cuda()].isnan().all()


def test_many_steps_with_joins_and_leaves(folder: Path) -> None:
    """Sequences come and go at random; each answers as it does alone, in torch, without a graph."""
    pick = random.Random(5)
    prompts = [prompt_of(pick.randrange(1, 60), seed=index) for index in range(24)]
    lengths = [pick.randrange(1, 30) for _ in prompts]
    alone = cuda_runner(folder, "llama", attention_backend="torch")
    expected = [
        tokens_of(drive(alone, make_sequences([prompt], length), length, CONTEXT))[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    runner = cuda_runner(folder, "llama", max_running_requests=16)
    waiting = list(zip(range(len(prompts)), prompts, lengths, strict=True))
    free = list(range(NUM_BLOCKS))
    live: list[tuple[int, Sequence_, int]] = []
    found: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    while waiting or live:
        if waiting and len(live) < 12 and pick.random() < 0.5:
            index, prompt, length = waiting.pop()
            pick.shuffle(free)
            blocks = [free.pop() for _ in range(-(-(len(prompt) + length) // BLOCK))]
            live.append((index, Sequence_(str(index), list(prompt), len(prompt), blocks, 0, GREEDY), length))
        if not live:
            continue
        batch = [sequence.scheduled(pick.choice((7, 16, CONTEXT))) for _, sequence, _ in live]
        for (index, sequence, _), item, token in zip(live, batch, runner.execute(batch), strict=True):
            sequence.computed += item.num_new
            if token is not None:
                sequence.tokens.append(token.token_id)
                found[index].append(token.token_id)
        for entry in [entry for entry in live if len(found[entry[0]]) == entry[2]]:
            free += entry[1].blocks
            live.remove(entry)
    assert list(found.values()) == expected


def test_sampled_output_does_not_depend_on_graphs(folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, logprobs=2, repetition_penalty=1.2)
    prompts = [prompt_of(30), prompt_of(41), prompt_of(12)]
    answers = [
        tokens_of(drive(runner, make_sequences(prompts, 10, sampling=sampling), 10, 13))
        for runner in (cuda_runner(folder, "llama", cuda_graphs="off"), cuda_runner(folder, "llama"))
    ]
    assert answers[0] == answers[1]
    assert all(EOS >= token >= 0 for answer in answers[0] for token in answer)


def test_tokens_drawn_on_the_device_are_those_of_the_host(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=3)
    prompts = [prompt_of(30), prompt_of(41), prompt_of(12)]
    runners = (runner_of(folder, "llama"), cuda_runner(folder, "llama"))
    answers = [
        tokens_of(drive(runner, make_sequences(prompts, 12, sampling=sampling), 12, CONTEXT))
        for runner in runners
    ]
    assert answers[0] == answers[1]


def test_broken_kv_fails_its_own_sequence_only(folder: Path) -> None:
    check_broken_kv_fails_alone(cuda_runner(folder, "llama"), folder, "llama")


def test_kv_is_there_when_a_step_returns(folder: Path) -> None:
    """Also after a chunk of which nothing is sampled: it is sent on at once, past the device's queue."""
    runner = cuda_runner(folder, "llama")
    sequence = make_sequences([prompt_of(100)], 1)[0]
    assert runner.execute([sequence.scheduled(96)]) == [None]
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_log_probabilities_of_prompts(folder: Path, graphs: str) -> None:
    check_prompt_logprobs(
        cuda_runner(folder, "gemma2", cuda_graphs=graphs), folder, "gemma2", [BLOCK, CONTEXT]
    )


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_the_first_half_of_a_step_does_not_wait(folder: Path, graphs: str) -> None:
    runner = cuda_runner(folder, "llama", cuda_graphs=graphs)
    check_halves(runner)
    sequence = make_sequences([prompt_of(BLOCK - 1)], 3)[0]
    drive(runner, [sequence], 2, CONTEXT)  # the next token begins a block, so the table changes too
    torch.cuda._sleep(1 << 30)  # half a second of the device's time
    finish = runner.begin([sequence.scheduled(1)])
    assert runner.overlaps
    assert not torch.cuda.current_stream().query()
    assert finish() != [None]
    assert torch.cuda.current_stream().query()
