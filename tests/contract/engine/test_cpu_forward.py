"""Whole models with the cpu kernels: as accurate as torch in bfloat16, in any batch, with graphs and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends.cpu.forward import CpuForward
from engine.backends.cpu.graphs import step_graphs
from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.runner.sampler import NanLogitsError
from engine.runner.torch_runner import TorchRunner
from tests.support.engine.cpu_kernels import THREADS, count_ops, kernels_or_skip
from tests.support.engine.runner_driver import (
    BLOCK,
    Sequence_,
    check_prompt_logprobs,
    drive,
    make_sequences,
    prompt_of,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import CONTEXT, WINDOW, make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
kernels_or_skip()
DENSE = ["wide_llama", "wide_qwen2", "wide_qwen3", "wide_mistral", "wide_gemma2", "wide_gemma3", "wide_phi3"]
FAMILIES = [*DENSE, "wide_mixtral", "llama_wide"]
ANSWER = 8
LENGTHS = [1, BLOCK - 1, BLOCK, WINDOW + 1, 3 * WINDOW + 5, 140]
Event = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    logged: list[Event] = []
    monkeypatch.setattr(step_graphs, "log_event", lambda event, **fields: logged.append((event, fields)))
    return logged


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tiny"


def kernel_runner(folder: Path, family: str, **settings: int | str) -> tuple[TorchRunner, CpuForward]:
    """Whatever lies in blocks that are not a sequence's own must not matter, not even NaN."""
    runner = runner_of(folder, family, "bfloat16", **settings)
    runner._pool.tensor.fill_(float("nan"))
    assert isinstance(runner._forward, CpuForward)
    return runner, runner._forward


def forced(runner: TorchRunner, sequences: Sequence[Sequence_], chunk: int) -> list[torch.Tensor]:
    """Log probabilities `[ANSWER, vocabulary]` behind each prompt, whose answer is in `tokens` already."""
    found: dict[str, list[torch.Tensor]] = {sequence.name: [] for sequence in sequences}
    step = 0
    while live := [s for s in sequences if s.computed < len(s.tokens)]:
        live = [s for s in live if s.starts_at <= step]
        batch = [forced_step(sequence, chunk) for sequence in live]
        step += 1
        if not batch:
            continue
        with torch.inference_mode():
            logits = runner._forward.logits(batch)
            rows = logits.values.float().log_softmax(-1)
        for row, index in enumerate(logits.order):
            found[live[index].name].append(rows[row])
        for sequence, item in zip(live, batch, strict=True):
            sequence.computed += item.num_new
    return [torch.stack(rows) for rows in found.values()]


def forced_step(sequence: Sequence_, chunk: int) -> ScheduledSequence:
    left = sequence.prompt_tokens - sequence.computed
    scheduled = sequence.scheduled(min(chunk, left) if left > 0 else 1)
    end = scheduled.num_computed + scheduled.num_new
    return scheduled._replace(sample=end >= sequence.prompt_tokens)


def texts(lengths: Sequence[int], stagger: int = 1) -> list[Sequence_]:
    """A prompt of each length, and `ANSWER` tokens, the last of which is not computed."""
    sequences = make_sequences([prompt_of(length + ANSWER - 1) for length in lengths], 0, stagger)
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.prompt_tokens = length
    return sequences


def exact(folder: Path, family: str, sequences: Sequence[Sequence_]) -> list[torch.Tensor]:
    """By `transformers` in float32, of the same weights rounded to bfloat16."""
    path = make_tiny_model(family, folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    model = model.float().eval()
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([sequence.tokens])).logits[0] for sequence in sequences]
    return [rows[-ANSWER:].log_softmax(-1) for rows in logits]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(expected)).abs().mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_as_accurate_as_torch(folder: Path, family: str) -> None:
    """Chunks, single tokens and steps that only decode: the rounding to bfloat16 is all that is lost."""
    expected = exact(folder, family, texts(LENGTHS))
    plain_runner = runner_of(folder, family, "bfloat16", cpu_kernels="off")
    assert not isinstance(plain_runner._forward, CpuForward)
    plain = error(forced(plain_runner, texts(LENGTHS), 50), expected)
    assert plain < 0.2, "else nothing is compared"
    runner, forward = kernel_runner(folder, family)
    for chunk in (BLOCK - 1, 50, CONTEXT):
        assert error(forced(runner, texts(LENGTHS), chunk), expected) < 1.4 * plain, f"chunk {chunk}"
    assert runner.layout == plain_runner.layout
    assert forward.step_graphs.graphs or family == "wide_mixtral", "which chooses its experts by value"


@pytest.mark.parametrize("family", ["wide_llama", "wide_gemma2"])
def test_log_probabilities_of_prompts(folder: Path, family: str) -> None:
    runner, _ = kernel_runner(folder, family)
    check_prompt_logprobs(runner, folder, family, [BLOCK - 1, CONTEXT], tolerance=0.15)


@pytest.mark.parametrize("threads", THREADS)
def test_batches_of_any_size(folder: Path, events: list[Event], threads: int) -> None:
    """Sequences join one by one and leave at different times."""
    lengths = [5 + 3 * index for index in range(12)]
    expected = exact(folder, "wide_qwen3", texts(lengths))
    runner, forward = kernel_runner(folder, "wide_qwen3", threads=threads, max_running_requests=20)
    for count in (*range(1, 13),) if threads == 1 else (3, 12):
        found = forced(runner, texts(lengths[:count], stagger=0), CONTEXT)
        assert error(found, expected[:count]) < 0.05, f"{count} rows"
    joined = forced(runner, texts(lengths, stagger=2), 4)
    assert error(joined, expected) < 0.05
    many = texts([*range(2, 19)], stagger=0)
    assert error(forced(runner, many, CONTEXT), exact(folder, "wide_qwen3", many)) < 0.05
    assert set(forward.step_graphs.graphs) == {(80, 64), (512, 64)}
    assert events == []


@pytest.mark.parametrize("family", DENSE)
def test_a_row_does_not_depend_on_the_others(folder: Path, family: str) -> None:
    """Bit for bit, whichever graph is replayed, and when other sequences' prompts are computed in the same steps."""
    lengths = [30, 5, 41, 12, 60, 9, 77]
    runner, _ = kernel_runner(folder, family)
    together = forced(runner, texts(lengths, stagger=0), CONTEXT)
    for count in (1, 2, 3, 5):
        some = forced(runner, texts(lengths[:count], stagger=0), CONTEXT)
        for index, rows in enumerate(some):
            assert torch.equal(rows, together[index]), f"row {index} of {count}"
    for chunk in (7, CONTEXT):
        assert all(map(torch.equal, forced(runner, texts(lengths, stagger=2), chunk), together)), chunk
    other, _ = kernel_runner(folder, family, threads=2)
    assert all(map(torch.equal, forced(other, texts(lengths, stagger=0), CONTEXT), together))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("threads", THREADS)
def test_chunks_of_any_length(folder: Path, family: str, threads: int) -> None:
    """Graphs with rows to spare: bit for bit as without, and no KV but that of the chunk's tokens is written."""
    runner, forward = kernel_runner(folder, family, threads=threads)
    plain, without_graphs = kernel_runner(folder, family, threads=threads)
    without_graphs.step_graphs.works = False
    lengths = [1, 2, 15, 16, 17, 33, 3 * WINDOW + 5, 140]
    for chunk in (CONTEXT, 19):
        for length in lengths:
            (found,) = forced(runner, texts([length]), chunk)
            (expected,) = forced(plain, texts([length]), chunk)
            assert torch.equal(found, expected), f"{length} tokens, {chunk} a chunk"
    assert forward.step_graphs.graphs
    assert not without_graphs.step_graphs.graphs
    assert torch.equal(runner._pool.tensor.isnan(), plain._pool.tensor.isnan())


@pytest.mark.parametrize("threads", THREADS)
def test_chunks_and_decodes_in_one_step(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as without graphs, with more chunks than a graph has, and with parts that sample nothing."""
    monkeypatch.setattr(step_graphs, "MAX_CHUNKS", 3)
    runner, forward = kernel_runner(folder, "wide_qwen3", threads=threads)
    plain, without_graphs = kernel_runner(folder, "wide_qwen3", threads=threads)
    without_graphs.step_graphs.works = False
    for lengths, stagger, chunk in (
        ([9, 40, 30, 77, 50], 0, 19),
        ([20] * 3, 0, 8),
        ([5, 6, 70, 90, 8], 1, CONTEXT),
    ):
        found = forced(runner, texts(lengths, stagger), chunk)
        expected = forced(plain, texts(lengths, stagger), chunk)
        assert all(map(torch.equal, found, expected)), (lengths, chunk)
    assert forward.step_graphs._checked >= {(80, True, 0), (80, True, 1), (80, True, 2), (80, False, 1)}
    assert torch.equal(runner._pool.tensor.isnan(), plain._pool.tensor.isnan())


def test_steps_say_when_they_prepare_others(folder: Path) -> None:
    runner, _ = kernel_runner(folder, "wide_llama")
    (sequence,) = texts([40])
    prepared = []
    for tokens in (20, 1, 1, 19, 1):
        runner.execute([sequence.scheduled(tokens)._replace(sample=True)])
        prepared.append(runner.prepared)
        sequence.computed += tokens
    assert prepared == [True, True, False, False, False]


def test_a_graph_of_a_layer_that_is_not_the_kernels(folder: Path) -> None:
    """257 outputs are not whole vectors: that layer is called as it is."""
    runner, forward = kernel_runner(folder, "llama_wide")
    drive(runner, make_sequences([prompt_of(9)], 3), 3, CONTEXT)
    ops, calls = count_ops(forward.step_graphs.graphs[80, 64].graph)
    assert ops > calls > 0


@pytest.mark.parametrize("family", ["wide_llama", "wide_mistral"])
def test_broken_kv_fails_its_own_sequence_only(folder: Path, family: str) -> None:
    prompts = [prompt_of(20), prompt_of(21), prompt_of(22)]
    runner, _ = kernel_runner(folder, family)
    expected = tokens_of(drive(runner, make_sequences(prompts, 6, stagger=0), 6, CONTEXT))
    sequences = make_sequences(prompts, 6, stagger=0)
    drive(runner, sequences, 3, CONTEXT)
    # What is before the window is not looked at.
    runner._pool.tensor[sequences[1].blocks[2]] = float("nan")
    batch = [sequence.scheduled(1) for sequence in sequences]
    with pytest.raises(NanLogitsError) as failure:
        runner.execute(batch)
    assert failure.value.rows == (1,)
    again = runner.execute([batch[0], batch[2]])
    assert [token.token_id for token in again if token] == [expected[0][3], expected[2][3]]
    assert tokens_of(drive(runner, make_sequences(prompts, 6, stagger=0), 6, CONTEXT)) == expected


def read_a_value(module: Callable[..., Any]) -> Callable[..., Any]:
    def forward(**inputs: Any) -> Any:
        output = module(**inputs)
        assert output.logits.sum() != 1e30
        return output

    return forward


def test_a_model_that_reads_values_has_no_graphs(folder: Path, events: list[Event]) -> None:
    expected = exact(folder, "wide_llama", texts(LENGTHS))
    runner, forward = kernel_runner(folder, "wide_llama")
    forward._module = read_a_value(forward._module)
    assert error(forced(runner, texts(LENGTHS), 50), expected) < 0.05
    assert forward.step_graphs.graphs == {}
    ((event, fields),) = events
    assert event == "engine.step_graphs_off"
    assert "depend on values" in fields["why"]


def test_a_graph_that_is_wrong_is_not_used(folder: Path, events: list[Event]) -> None:
    """What nothing can see: a value that goes through Python."""

    def forget(module: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*, input_ids: torch.Tensor, **inputs: Any) -> Any:
            return module(input_ids=torch.tensor(input_ids.tolist()), **inputs)

        return forward

    expected = exact(folder, "wide_llama", texts(LENGTHS))
    runner, forward = kernel_runner(folder, "wide_llama")
    forward._module = forget(forward._module)
    assert error(forced(runner, texts(LENGTHS), 50), expected) < 0.05
    ((event, fields),) = events
    assert event == "engine.step_graphs_off"
    assert "logits differ" in fields["why"]


def test_probabilities_outlive_the_memory_of_their_step(folder: Path) -> None:
    """Logits lie in the same memory every step; what is sampled from them, with penalties too, is not disturbed."""
    samplings = [
        SamplingParams(temperature=1.0, seed=7, logprobs=2),
        SamplingParams(temperature=0.0, logprobs=1, repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(temperature=0.7, seed=8, top_k=5, logit_bias=((3, 2.0),)),
    ]
    runner, _ = kernel_runner(folder, "wide_llama")
    prompts = [prompt_of(10), prompt_of(11), prompt_of(12)]
    sequences = make_sequences(prompts, ANSWER, stagger=0)
    for sequence, sampling in zip(sequences, samplings, strict=True):
        sequence.sampling = sampling
    sequences[2].banned = frozenset({1, 2})
    answers = drive(runner, sequences, ANSWER, CONTEXT)
    again = make_sequences(
        [s.tokens[: len(prompt) + ANSWER - 1] for s, prompt in zip(sequences, prompts, strict=True)], 0, 0
    )
    for sequence, prompt in zip(again, prompts, strict=True):
        sequence.prompt_tokens = len(prompt)
    rows = forced(runner, again, CONTEXT)
    for step, token in enumerate(answers[0]):
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(float(rows[0][step, token.token_id]), abs=1e-5)
        assert token.logprob.top[0][0] == int(rows[0][step].argmax())
    last = [sequence.scheduled(1) for sequence in sequences]
    assert runner.execute(last) == runner.execute(last)


def test_a_step_of_which_some_are_not_sampled(folder: Path) -> None:
    """The last chunk of a prompt can be one token, and so can one that is not the last."""
    runner, _ = kernel_runner(folder, "wide_llama")
    prompts = [prompt_of(9), prompt_of(12)]
    expected = tokens_of(drive(runner, make_sequences(prompts, 4, stagger=0), 4, CONTEXT))
    found = tokens_of(drive(runner, make_sequences(prompts, 4, stagger=0), 4, 1))
    assert [answer[0] for answer in found] == [answer[0] for answer in expected]
    whole = forced(runner, texts([1, 9, 12], stagger=3), 1)
    assert error(whole, exact(folder, "wide_llama", texts([1, 9, 12]))) < 0.05
