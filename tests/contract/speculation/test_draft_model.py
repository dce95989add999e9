"""A draft model with real weights: answers are those without it, and one that is the model itself is never wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.engine.speculation.draft_pairs import without_layers
from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, SamplingParams, StopParams
from engine.runner.draft_runner import load_draft_model
from engine.runner.torch_runner import TorchRunner, build_torch_runner
from engine.speculation.draft_model import DraftModel
from engine.worker.build import build_engine
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import ModelSource
from splitserve.models.tokenizer import Tokenizer
from tests.support.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "num_blocks": 64}
TOKENS = 14
TEXTS = {
    "greedy": ("The capital of France is", SamplingParams(temperature=0.0)),
    "long": ("It is a truth universally acknowledged, " * 6, SamplingParams(temperature=0.0)),
    "sampled": (
        "Once upon a time there was",
        SamplingParams(temperature=0.8, top_p=0.95, seed=5, repetition_penalty=1.2, logprobs=1),
    ),
}


@dataclass
class Parts:
    """The model, and what its prompts are answered without drafts."""

    source: ModelSource
    runner: TorchRunner
    tokenizer: Tokenizer
    plain: dict[str, list[int]]


@dataclass
class Ticking:
    """Moves on whenever it is looked at, by a millisecond: all steps take as long, whatever the machine does."""

    step_s: float = 1e-3
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def answers(
    parts: Parts, config: EngineConfig, drafter: DraftModel | None
) -> tuple[dict[str, list[int]], int, int]:
    """The answers, given together, and how many tokens were drafted and accepted."""
    core = EngineCore(parts.runner, config, parts.tokenizer, Ticking(), drafter)
    found: dict[str, list[int]] = {name: [] for name in TEXTS}
    for name, (text, sampling) in TEXTS.items():
        prompt = tuple(parts.tokenizer.encode(text))
        core.add_request(EngineRequest(name, prompt, sampling, StopParams(TOKENS, ignore_eos=True)))
    while core.has_work():
        for output in core.step().outputs:
            assert output.failure is None
            found[output.request_id] += output.token_ids
    totals = core.step_totals["decode"]
    return found, totals.drafted_tokens, totals.accepted_tokens


@pytest.fixture(scope="module")
def parts(smollm2: ModelSource) -> Parts:
    config = EngineConfig.model_validate(SETTINGS)
    runner = build_torch_runner(config, smollm2, lambda _fraction: None)
    made = Parts(smollm2, runner, load_tokenizer(smollm2.tokenizer_source), {})
    made.plain, *_ = answers(made, config, None)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itself", "without a layer"])
def test_answers_are_those_without(parts: Parts, tmp_path: Path, kind: str) -> None:
    folder = Path(parts.source.path)
    if kind != "itself":
        folder = without_layers(folder, tmp_path / "draft", {15})
    config = EngineConfig.model_validate(
        {**SETTINGS, "speculation": "draft-model", "draft_model": str(folder)}
    )
    draft = load_draft_model(config, parts.source)
    assert draft is not None
    runner = draft.runner(parts.runner.num_blocks)
    assert runner.layout.block_bytes == draft.block_bytes
    drafter = DraftModel(runner, parts.runner.facts.vocabulary_size, clock=Ticking(1e-6))
    found, drafted, accepted = answers(parts, config, drafter)
    runner.close()
    assert found == parts.plain
    assert accepted > 12
    assert accepted == drafted if kind == "itself" else accepted < drafted


def test_kv_memory_holds_blocks_of_both_models(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    draft = without_layers(model, tmp_path / "draft", {1})
    memory = 2**20
    engine = EngineConfig.model_validate(
        {
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "kv_memory_bytes": memory,
            "speculation": "draft-model",
            "draft_model": str(draft),
        }
    )
    config = WorkerConfig(worker_id="w", model=str(model), transport="memory", engine=engine)
    parts = build_engine(config)
    block_bytes = parts.endpoint.memory.layout.block_bytes
    assert parts.core.load().total_blocks == memory // (block_bytes + block_bytes // 2)
    parts.core.close()
