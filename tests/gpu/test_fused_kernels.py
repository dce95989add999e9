"""Fused kernels on a GPU: the same answers as without them, in use, with fewer launches, compiled once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.runner_driver import (
    drive,
    make_sequences,
    prompt_of,
    reference,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import CONTEXT, FAMILIES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),  # kernels are compiled on first use
]
KERNELS = ("_rms_norm", "_rotate", "_gated")
LENGTHS = [1, 9, 30, 77]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tiny"


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def eager_runner(folder: Path, family: str, dtype: str = "float32") -> Any:
    """Without graphs, so that `unfuse` shows at once."""
    runner = runner_of(
        folder,
        family,
        dtype,
        device="cuda:0",
        attention_backend="triton",
        cuda_graphs="off",
        device_sampling="off",
    )
    assert fused_kinds(runner), "nothing is fused; the log says why"
    return runner


def module_of(runner: Any) -> Any:
    return runner._forward._module


def fused_kinds(runner: Any) -> Counter[str]:
    from engine.backends.cuda.fused.forward import FusedForward

    forwards = [vars(part).get("forward") for part in module_of(runner).modules()]
    return Counter(type(forward).__name__ for forward in forwards if isinstance(forward, FusedForward))


def unfused(runner: Any) -> None:
    from engine.backends.cuda.fused.install import unfuse

    unfuse(module_of(runner))
    assert not fused_kinds(runner)


def launches(runner: Any, batch: list[Any]) -> Counter[str]:
    """Names of the kernels of one step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    runner.execute(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        runner.execute(batch)
        torch.cuda.synchronize()
    on_device = [event.name for event in found.events() if event.device_type == DeviceType.CUDA]
    return Counter(name for name in on_device if not name.startswith(("Memcpy", "Memset")))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_with_and_without(folder: Path, family: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    runner = eager_runner(folder, family)
    kinds = fused_kinds(runner)
    layers = module_of(runner).config.num_hidden_layers
    assert kinds["FusedNorm"] > 2 * layers
    assert kinds["FusedRotary"] == layers
    assert kinds["FusedFeedForward"] == (0 if family == "mixtral" else layers)
    answers = [tokens_of(drive(runner, make_sequences(prompts, 6), 6, CONTEXT))]
    unfused(runner)
    answers.append(tokens_of(drive(runner, make_sequences(prompts, 6), 6, CONTEXT)))
    assert answers[0] == answers[1] == reference(folder, family, prompts, 6)
    runner.close()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "phi3", "olmo2"])
def test_logits_are_close_in_bfloat16(folder: Path, family: str) -> None:
    runner = eager_runner(folder, family, "bfloat16")
    sequences = make_sequences([prompt_of(length) for length in LENGTHS], 1, stagger=0)
    batch = [sequence.scheduled(CONTEXT) for sequence in sequences]
    found = []
    for _ in range(2):
        with torch.inference_mode():
            found.append(runner._forward.logits(batch).values.float().cpu())
            runner._forward.finish()
        unfused(runner)
    difference = torch.linalg.vector_norm(found[0] - found[1])
    assert difference < 0.02 * torch.linalg.vector_norm(found[1])
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_launches_less_than_half(folder: Path, dtype: str) -> None:
    runner = eager_runner(folder, "llama_deep", dtype)
    sequences = make_sequences([prompt_of(20), prompt_of(9)], 4, stagger=0)
    drive(runner, sequences, 2, CONTEXT)
    batch = [sequence.scheduled(1) for sequence in sequences]
    with_them = launches(runner, batch)
    layers = 8
    expected = {"_rms_norm": 2 * layers + 1, "_rotate": layers, "_gated": layers}
    assert {name: with_them[name] for name in KERNELS} == expected, with_them
    unfused(runner)
    without = launches(runner, batch)
    assert not any(without[name] for name in KERNELS)
    saved = without.total() - with_them.total()
    assert saved >= 18 * layers, (with_them, without)
    # In float32 the norms have no conversions to save.
    assert dtype == "float32" or saved >= with_them.total(), (with_them, without)
    runner.close()


def test_batches_of_all_sizes_share_the_compiled_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of rows are no constants of the kernels: after the start and one step nothing is compiled."""
    from triton import knobs

    runner = eager_runner(folder, "llama_wide", "bfloat16")
    drive(runner, make_sequences([prompt_of(3)], 2), 2, CONTEXT)
    compiled: list[str] = []

    def note(**about: Any) -> None:
        compiled.append(str(about.get("repr", "")).partition("[")[0])

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    for rows in (1, 2, 3, 16, 17):
        prompts = [prompt_of(5 + 3 * index, seed=rows) for index in range(rows)]
        drive(runner, make_sequences(prompts, 2, stagger=0), 2, CONTEXT)
    assert not [name for name in compiled if name.rpartition(".")[2] in KERNELS], compiled
    runner.close()


def test_replayed_steps_are_those_without(folder: Path) -> None:
    """CUDA graphs with the kernels against eager steps without them."""
    plain = eager_runner(folder, "llama")
    unfused(plain)
    replayed = runner_of(folder, "llama", device="cuda:0", max_running_requests=5)
    assert fused_kinds(replayed)
    sizes = replayed._forward.graph_sizes  # type: ignore[attr-defined]
    assert [size.decodes for size in sizes if not size.tokens] == [1, 2, 4, 8]
    for rows in (1, 3, 5):
        prompts = [prompt_of(5 + index, seed=rows) for index in range(rows)]
        answers = [
            tokens_of(drive(runner, make_sequences(prompts, 6, stagger=0), 6, CONTEXT))
            for runner in (plain, replayed)
        ]
        assert answers[0] == answers[1], f"{rows} rows"
