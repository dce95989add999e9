"""vLLM's offloading of KV to main memory, beside the handoff. On CPU the copies are the test's (`HostCopies`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.vllm import boot
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.engine.reference import Reference
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.engine.vllm_rig import VllmRig

BLOCK, BLOCKS, LENGTH, MAX_TOKENS = 32, 20, 170, 6
"""The pool holds three prompts."""
HOST_COPIES = {"kv_connector": "HostCopies", "kv_connector_module_path": "tests.support.engine.host_copies"}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama_4_heads", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rig(model: str) -> Iterator[VllmRig]:
    engine = EngineConfig(
        kind="vllm",
        dtype="float32",
        num_blocks=BLOCKS,
        context_tokens=512,
        max_step_tokens=64,
        threads=1,
        engine_args="--kv-offloading-size 0.1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "OFFLOADING", {"cpu": HOST_COPIES})
        rig = VllmRig.of(model, engine)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def prompts(model: str) -> list[list[int]]:
    tokens = load_tokenizer(model).encode(sentences(200, seed=3))
    return [tokens[start : start + LENGTH] for start in range(0, 8 * LENGTH, LENGTH)]


def asked(name: str, prompt: list[int], *, prefill_only: bool = False) -> EngineRequest:
    request = EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0), StopParams(MAX_TOKENS))
    return replace(request, prefill_only=prefill_only)


def answered(rig: VllmRig, name: str, prompt: list[int], *, prefill_only: bool = False) -> list[int]:
    rig.core.add_request(asked(name, prompt, prefill_only=prefill_only))
    rig.run()
    assert rig.core.release_held(name) == prefill_only
    return rig.tokens(name)


@pytest.mark.parametrize(
    ("gib", "device", "why"),
    [
        ("1", "cuda", "is for GPUs"),
        ("0", "cpu", "above 0"),
        ("-1", "cpu", "above 0"),
        ("nan", "cpu", "at most 65536"),
    ],
)
def test_what_cannot_be_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, gib: str, device: str, why: str
) -> None:
    monkeypatch.setattr(boot, "OFFLOADING", {device: HOST_COPIES})
    engine = EngineConfig(kind="vllm", context_tokens=512, engine_args=f"--kv-offloading-size={gib}")
    with pytest.raises(ConfigError, match=f"--kv-offloading-size .*{why}") as raised:
        VllmRig.of(model, engine)
    assert raised.value.field == "engine.engine_args"


def test_a_prompt_that_left_the_device_comes_back(rig: VllmRig, model: str, prompts: list[list[int]]) -> None:
    """As on a prefill worker, and while reservations take and leave the blocks that are being copied."""
    reference = Reference(model)
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            name, expected = f"{turn} {number}", reference.greedy(prompt, MAX_TOKENS)
            assert answered(rig, name, prompt) == expected
            assert answered(rig, f"{name} for a peer", prompt, prefill_only=True) == expected[:1]
            other = asked(f"{name} reserved", prompts[number - 3])
            rig.until(lambda: rig.core.reserve(other, 7) is not None, "no blocks")  # noqa: B023 (called at once)
            rig.core.abort(f"{name} reserved")
            rig.core.release_writer(7)
    full = LENGTH // BLOCK * BLOCK
    rig.until(
        lambda: all(rig.core.cached_tokens(asked("c", p)) == full for p in prompts), "the router sees all"
    )
    rig.assert_empty()
    assert {rig.started[f"2 {number}"] for number in range(len(prompts))} == {full}, "none is computed again"
