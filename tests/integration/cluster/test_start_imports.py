"""What a worker must not import on its way to the first request: that was two thirds of its start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

HEAVY = (
    "gguf",
    "numba",
    "pandas",
    "scipy",
    "sklearn",
    "statsmodels",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
    "torchvision",
    "transformers.trainer",
    "vllm",
)
SIMULATED_TOO = ("torch", "transformers")
MODEL = "transformers.models.llama.modeling_llama"


def loaded(program: str, names: tuple[str, ...], *path: Path) -> list[str]:
    """Which of these modules a new interpreter has imported after this program. `path`: where it looks first."""
    ask = f"import sys\n{program}\nprint(*[name for name in {names} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, *filter(None, sys.path))))}
    command = [sys.executable, "-c", ask]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment
    )
    return done.stdout.split()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["prefill", "decode", "neutral"])
def test_a_simulated_worker_imports_no_model_library(kind: str) -> None:
    assert loaded(f"import {kind}_worker.service", (*HEAVY, *SIMULATED_TOO)) == []


@pytest.mark.timeout(120)
def test_a_worker_imports_nothing_for_training_and_compiling() -> None:
    program = f"import prefill_worker.service, engine.runner.torch_runner, {MODEL}"
    assert loaded(program, HEAVY) == []


BESIDE = (
    "hqq",
    "kernels",
    "librosa",
    "peft",
    "scipy",
    "sklearn",
    "soundfile",
    "soxr",
    "torchao",
    "torchaudio",
    "torchcodec",
    "torchvision",
)


@pytest.mark.timeout(120)
def test_a_worker_imports_nothing_that_is_installed_beside_it(tmp_path: Path) -> None:
    for name in BESIDE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("from torch._dynamo.utils import is_compile_supported\n")
        (tmp_path / f"{name}-99.0.dist-info").mkdir()
        (tmp_path / f"{name}-99.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 99.0\n")
    program = f"import prefill_worker.service, engine.runner.torch_runner, {MODEL}"
    assert loaded(program, (*BESIDE, *HEAVY), tmp_path) == []


START = """
import engine.model.lean_torch
from engine.core.model_runner import warm_up
from engine.runner.torch_runner import build_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.models.sources import resolve_model
config = EngineConfig(kv_memory_bytes=20_000_000, device="cpu", threads=1)
runner = build_torch_runner(config, resolve_model("smollm2-135m-instruct"), lambda fraction: None)
assert warm_up(runner, None)
"""


UNUSED_OF_TORCH = (
    "torch._refs",
    "torch.ao.quantization",
    "torch.export.exported_program",
    "torch.masked.maskedtensor",
)
# A build for CUDA asks the driver by these.
UNUSED_ON_CPU = ("cuda.bindings", "pynvml") if version("torch").endswith("+cpu") else ()


@pytest.mark.timeout(180)
def test_nor_where_it_loads_weights_and_captures_its_first_steps() -> None:
    assert loaded(START, (*HEAVY, *UNUSED_OF_TORCH, *UNUSED_ON_CPU)) == []


USES = """
import engine.model.lean_torch, engine.runner.torch_runner
import torch
taken = torch.vmap
assert torch.equal(torch.vmap(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))
assert torch.vmap is torch.func.vmap and torch.vmap is not taken
assert torch.masked.as_masked_tensor and torch.nn.quantized.Linear and torch.quantization.QConfig
assert torch.ao.quantization is __import__("torch.ao.quantization").ao.quantization
assert torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(1)) == 1
class Module(torch.nn.Module):
    def forward(self, x):
        return x.cos()
program = torch.export.export(Module(), (torch.zeros(2),))
assert torch.equal(program.module()(torch.zeros(2)), torch.ones(2))
"""


@pytest.mark.timeout(180)
def test_who_uses_what_is_left_out_of_torch_has_it() -> None:
    assert loaded(USES, ("torch._refs",)) == ["torch._refs"]


@pytest.mark.timeout(120)
def test_the_compiler_is_there_for_who_asks_for_it() -> None:
    program = "import engine.runner.torch_runner, torch._dynamo\nassert torch._dynamo.optimize"
    assert loaded(program, ("torch._dynamo",)) == ["torch._dynamo"]
