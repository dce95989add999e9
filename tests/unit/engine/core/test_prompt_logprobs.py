"""Log-probabilities of prompts at the engine's door: those of `transformers`, computed once, whatever is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.engine import EngineRequest, RequestLimits, RequestOutput
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SamplingParams
from splitserve.config.engine import EngineConfig
from splitserve.errors import InvalidArgumentError
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import request
from tests.support.engine.reference import Reference, assert_prompt_logprobs
from tests.support.engine.runner_driver import BLOCK, prompt_of, runner_of
from tests.support.engine.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
TOP = 2
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=TOP)
Outputs = dict[str, list[RequestOutput]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(str(make_tiny_model("llama", folder)))


@pytest.fixture
def make_core(folder: Path) -> Callable[..., EngineCore]:
    def make(**settings: int) -> EngineCore:
        config = EngineConfig.model_validate({"max_step_tokens": 2 * BLOCK + 1, **settings})
        blocks = {"num_blocks": settings["num_blocks"]} if "num_blocks" in settings else {}
        return EngineCore(runner_of(folder, "llama", **blocks), config, ByteTokenizer())

    return make


def run(core: EngineCore) -> Outputs:
    outputs: Outputs = {}
    while core.has_work():
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def check(outputs: list[RequestOutput], asked: EngineRequest, reference: Reference) -> None:
    prompt = list(asked.token_ids)
    assert_prompt_logprobs(outputs[0].prompt_logprobs, prompt, reference.logprobs(prompt), TOP)
    assert not any(output.prompt_logprobs for output in outputs[1:])


@pytest.mark.parametrize("prefill_only", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3 * BLOCK, 150])
def test_beside_others_and_with_a_cached_prefix(
    make_core: Callable[..., EngineCore], reference: Reference, length: int, prefill_only: bool
) -> None:
    core, prompt = make_core(), prompt_of(length)
    core.add_request(request("stream", prompt_of(9)))
    core.add_request(request("plain", prompt))
    run(core)
    core.add_request(request("stream", prompt_of(9)))
    asked = request("scored", prompt, sampling=SCORED, prefill_only=prefill_only)
    core.add_request(asked)
    core.add_request(request("other", prompt_of(40), sampling=replace(SCORED, prompt_logprobs=0)))
    assert core.cached_tokens(asked) == 0
    outputs = run(core)
    check(outputs["scored"], asked, reference)
    assert outputs["stream"][0].prompt_logprobs is None
    other = outputs["other"][0].prompt_logprobs
    assert other is not None
    assert len(other.logprobs) == 39
    assert not any(other.top_token_ids)
    core.close()


def test_a_preempted_prompt_is_scored_again(
    make_core: Callable[..., EngineCore], reference: Reference
) -> None:
    core, preemptions = make_core(num_blocks=11, max_step_tokens=4), 0
    core.add_request(request("stream", prompt_of(9), max_tokens=40))
    core.step()
    asked = request("scored", prompt_of(8 * BLOCK), sampling=SCORED, max_tokens=2)
    core.add_request(asked)
    outputs: Outputs = {}
    while core.has_work():
        running = core.load().running_requests
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        preemptions += core.load().running_requests < running and "scored" not in outputs
    assert preemptions
    check(outputs["scored"], asked, reference)
    core.close()


def test_only_the_worker_that_computes_the_prompt_has_them(make_core: Callable[..., EngineCore]) -> None:
    """After a handoff and in a resumed answer they were sent before."""
    core, prompt = make_core(), prompt_of(3 * BLOCK)
    core.add_request(request("warm", prompt))
    run(core)
    reserved = core.reserve(request("handed", prompt, sampling=SCORED), 7)
    assert reserved is not None
    assert reserved.cached_tokens == 3 * BLOCK
    core.admit(7, 65)
    core.release_writer(7)
    resumed = request("resumed", [*prompt, 65, 66], sampling=SCORED, prior_output_tokens=2)
    assert core.cached_tokens(resumed) == 3 * BLOCK
    core.add_request(resumed)
    outputs = run(core)
    assert outputs.keys() == {"handed", "resumed"}
    assert not any(output.prompt_logprobs for name in outputs for output in outputs[name])
    core.close()


def test_a_model_that_scores_no_prompts_refuses_to() -> None:
    limits = RequestLimits(100, 100, 257, scores_prompts=False)
    limits.check(request("plain", prompt_of(9)))
    with pytest.raises(InvalidArgumentError) as refused:
        limits.check(request("scored", prompt_of(9), sampling=SCORED))
    assert refused.value.field == "sampling.prompt_logprobs"
