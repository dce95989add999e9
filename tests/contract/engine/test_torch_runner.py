"""TorchRunner against `transformers`' own generate: every attention kind, any chunking, any block table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.backends.torch_native.batch import TILE_TOKENS
from engine.core.model_runner import SamplingParams
from engine.runner.torch_runner import build_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, NotFoundError, SplitserveError, UnsupportedModelError
from splitserve.models.sources import checked_model
from tests.support.engine.runner_driver import (
    BLOCK,
    NUM_BLOCKS,
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
from tests.support.engine.tiny_models import (
    CONTEXT,
    EOS,
    FAMILIES,
    REFUSED,
    VOCABULARY,
    WINDOW,
    make_tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")
MAX_TOKENS = 12
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5, 100]
CHUNKS = [BLOCK - 1, BLOCK, BLOCK + 1, CONTEXT]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tiny"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(folder: Path, family: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = reference(folder, family, prompts, MAX_TOKENS)
    assert len(set(map(tuple, expected))) > len(LENGTHS) // 2, "the model's output is degenerate"
    runner = runner_of(folder, family)
    # Whatever lies in blocks that are not a sequence's own must not matter, not even NaN.
    runner._pool.tensor.fill_(float("nan"))
    for chunk in CHUNKS:
        answers = drive(runner, make_sequences(prompts, MAX_TOKENS), MAX_TOKENS, chunk)
        assert tokens_of(answers) == expected, f"chunk {chunk}"


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_prompts(folder: Path, family: str) -> None:
    check_prompt_logprobs(runner_of(folder, family), folder, family, CHUNKS)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_prompts_longer_than_a_tile(folder: Path, family: str) -> None:
    prompts = [prompt_of(TILE_TOKENS + 50), prompt_of(TILE_TOKENS)]
    expected = reference(folder, family, prompts, 4)
    runner = runner_of(folder, family)
    for chunk in (CONTEXT, TILE_TOKENS + 3, TILE_TOKENS + 40):
        answers = drive(runner, make_sequences(prompts, 4), 4, chunk)
        assert tokens_of(answers) == expected, f"chunk {chunk}"


def test_contexts_of_very_different_length_in_one_batch(folder: Path) -> None:
    prompts = [prompt_of(length) for length in (400, 3, 390, 90, 17, 300)]
    expected = reference(folder, "llama", prompts, 6)
    sequences = make_sequences(prompts, 6, stagger=0)
    assert tokens_of(drive(runner_of(folder, "llama"), sequences, 6, CONTEXT)) == expected


def test_two_runners_side_by_side(folder: Path) -> None:
    prompts = [prompt_of(20), prompt_of(33)]
    first, second = runner_of(folder, "llama"), runner_of(folder, "gemma2")
    for _ in range(2):
        for runner, family in ((first, "llama"), (second, "gemma2")):
            answers = drive(runner, make_sequences(prompts, 5), 5, 16)
            assert tokens_of(answers) == reference(folder, family, prompts, 5)
    assert first.layout.model_fingerprint != second.layout.model_fingerprint


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_bfloat16_is_deterministic(folder: Path, family: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    runner = runner_of(folder, family, "bfloat16")
    runs = [tokens_of(drive(runner, make_sequences(prompts, 6), 6, 16)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runner.layout.dtype == "bfloat16"
    # The dtype is a field of its own: weights and settings are the same.
    assert runner.layout.model_fingerprint == runner_of(folder, family).layout.model_fingerprint


def test_sampled_output_does_not_depend_on_the_batch(folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, logprobs=2, repetition_penalty=1.2)
    prompts = [prompt_of(30), prompt_of(41), prompt_of(12)]
    runner = runner_of(folder, "llama")
    together = drive(runner, make_sequences(prompts, 10, sampling=sampling), 10, 13)
    for index, prompt in enumerate(prompts):
        alone = drive(runner, make_sequences([prompt], 10, sampling=sampling), 10, CONTEXT)
        assert tokens_of(alone)[0] == tokens_of(together)[index]
    first = together[0][0].logprob
    assert first is not None
    assert len(first.top) == 2
    assert first.logprob <= first.top[0][1]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_resuming_from_emitted_tokens_gives_the_same_rest(folder: Path, temperature: float) -> None:
    """In float32: the tokens, and their log-probabilities but for rounding, though others share the steps."""
    sampling = SamplingParams(temperature=temperature, seed=99, frequency_penalty=0.5, logprobs=2)
    runner = runner_of(folder, "qwen3")
    lengths = [25, 3, 16, 40, 9, 31]
    whole = make_sequences([prompt_of(length) for length in lengths], 12, sampling=sampling)
    expected = drive(runner, whole, 12, 8)
    kept = [sequence.tokens[: length + 5] for sequence, length in zip(whole, lengths, strict=True)]
    resumed = make_sequences(kept, 12, stagger=3, sampling=sampling)
    for sequence, length in zip(resumed, lengths, strict=True):
        sequence.prompt_tokens = length
    for before, after in zip(expected, drive(runner, resumed, 7, CONTEXT), strict=True):
        assert [token.token_id for token in after] == [token.token_id for token in before[5:]]
        for one, other in zip(after, before[5:], strict=True):
            assert one.logprob is not None
            assert other.logprob is not None
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)


def test_broken_kv_fails_its_own_sequence_only(folder: Path) -> None:
    check_broken_kv_fails_alone(runner_of(folder, "llama"), folder, "llama")


def test_a_step_in_two_halves_is_the_step(folder: Path) -> None:
    runner = runner_of(folder, "llama")
    check_halves(runner)
    assert not runner.overlaps, "on cpu the first half computes"


def test_banned_tokens_are_not_chosen(folder: Path) -> None:
    prompt = prompt_of(20)
    runner = runner_of(folder, "llama")
    (first,) = reference(folder, "llama", [prompt], 1)[0]
    sequences = make_sequences([prompt], 1)
    sequences[0].banned = frozenset({first, EOS})
    answers = drive(runner, sequences, 1, CONTEXT)
    assert tokens_of(answers)[0][0] not in {first, EOS}


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_families_are_refused(folder: Path, family: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        runner_of(folder, family)
    words = {
        "gpt_oss": "s_aux",
        "mamba": "state",
        "deepseek_v3": "MLA",
        "lfm2": "state",
        "gpt_neo": "interface",
    }
    assert words[family] in refusal.value.message
    assert refusal.value.reason == "UNSUPPORTED_MODEL"


def test_facts_layout_and_pool(folder: Path) -> None:
    runner = runner_of(folder, "llama", context_tokens=100)
    assert runner.facts.context_tokens == 100
    assert runner.facts.vocabulary_size == VOCABULARY
    assert runner.facts.eos_token_ids == {EOS}
    memory = runner.pool_memory
    assert memory.layout == runner.layout
    assert memory.request_blocks == runner.num_blocks == NUM_BLOCKS
    assert memory.memory_kind == "DRAM"
    assert memory.base_address % 4096 == 0
    tensor = runner._pool.tensor
    assert tensor.stride(0) * tensor.element_size() == runner.layout.block_bytes
    assert not tensor.any()
    tensor[3] = 1.5
    blocks = runner.read_blocks([3, 4])
    assert [len(block) for block in blocks] == [runner.layout.block_bytes] * 2
    assert blocks[0].tobytes() == bytes(tensor[3].flatten().view(torch.uint8).tolist())
    assert not any(blocks[1])
    assert runner.execute([]) == []
    runner.close()


def test_settings_that_do_not_fit_the_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is more than the model's own"):
        runner_of(folder, "llama", context_tokens=CONTEXT + 1)
    source = checked_model(str(make_tiny_model("llama", folder)))
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, kv_memory_bytes=2**16, block_size_tokens=1024
    )
    with pytest.raises(ConfigError, match="kv_memory_bytes"):
        build_torch_runner(config, source)


def test_damaged_folders_are_one_line(folder: Path, tmp_path: Path) -> None:
    good = make_tiny_model("llama", folder)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    weights = tmp_path / "model.safetensors"
    config = EngineConfig(device="cpu", threads=1, num_blocks=4)

    def refusal(kind: type[SplitserveError]) -> str:
        with pytest.raises(kind) as error:
            build_torch_runner(config, checked_model(str(tmp_path)))
        assert "\n" not in error.value.message
        return error.value.reason

    weights.write_bytes(weights.read_bytes()[:1000])
    assert refusal(UnsupportedModelError) == "MODEL_UNREADABLE"
    save_file({"model.norm.weight": torch.ones(32)}, weights, metadata={"format": "pt"})
    assert refusal(UnsupportedModelError) == "MODEL_INCOMPLETE"
    weights.unlink()
    assert refusal(NotFoundError) == "NOT_FOUND"
    weights.write_bytes((good / weights.name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    assert refusal(UnsupportedModelError) == "UNSUPPORTED_MODEL"
