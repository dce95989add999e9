"""Siblings in one matrix give each family's own logits, keep names and values, and take no more memory than a layer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.model import sibling_linears
from engine.model.loaded_model import model_fingerprint
from engine.model.sibling_linears import MAX_DIFFERENCES, PackedSlice, pack_siblings, relative_difference
from tests.support.engine.runner_driver import (
    drive,
    make_sequences,
    prompt_of,
    reference,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import FAMILIES, make_tiny_model
from tests.support.engine.triton_interpreter import triton_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ALREADY_PACKED = {"phi3"}


def probed(model: Any) -> Callable[[], torch.Tensor]:
    tokens = torch.arange(1, 40, device=DEVICE).unsqueeze(0)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=tokens, use_cache=False).logits

    return logits


def loaded(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return (
        AutoModelForCausalLM.from_pretrained(make_tiny_model(family, folder), dtype=dtype).eval().to(DEVICE)
    )


def storages(model: nn.Module) -> int:
    """Bytes of all weights, each storage once."""
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(found.values())


@pytest.mark.parametrize("dtype", MAX_DIFFERENCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_stay(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = loaded(family, tmp_path, dtype)
    logits = probed(model)
    before, size = logits().float(), storages(model)
    fingerprint = model_fingerprint({}, model.state_dict())
    groups = pack_siblings(model, logits)
    slices = [module for module in model.modules() if isinstance(module, PackedSlice)]
    assert bool(groups) == bool(slices) == (family not in ALREADY_PACKED)
    for _ in range(2):  # nothing of one pass may reach the next
        after = logits().float()
        assert relative_difference(after, before) <= MAX_DIFFERENCES[dtype]
    assert all(part._shared._input is None for part in slices)
    assert storages(model) == size, "no weight is in memory twice"
    assert model_fingerprint({}, model.state_dict()) == fingerprint


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_greedy_output_is_that_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    """With biases, with soft caps and windows; our kernels read keys and values out of a wider product."""
    prompts = [prompt_of(13), prompt_of(30)]
    with nullcontext() if DEVICE.type == "cuda" or backend == "torch" else triton_interpreter():
        runner = runner_of(tmp_path, family, device=str(DEVICE), attention_backend=backend, cuda_graphs="off")
        module: Any = runner._forward._module  # type: ignore[attr-defined]
        if DEVICE.type == "cpu":  # on a device the loader has done it
            assert pack_siblings(module, lambda: torch.ones(1))
        assert any(isinstance(part, PackedSlice) for part in module.modules())
        answers = tokens_of(drive(runner, make_sequences(prompts, 6), 6, 16))
    assert answers == reference(tmp_path, family, prompts, 6)


def test_one_decoder_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("qwen2_window", tmp_path)
    probe = probed(model)
    layers = model.model.layers
    layer = storages(layers[0])
    join = sibling_linears.joined
    peaks = []

    def live() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(found.values())

    def measured(group: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = join(group)
        peaks.append(live())
        return made

    monkeypatch.setattr(sibling_linears, "joined", measured)
    before = live()
    assert pack_siblings(model, probe) == len(peaks) > 4
    logits = probe().nbytes
    assert max(peaks) - before <= layer + 2 * logits
    assert live() - before <= 2 * logits


class Decoder(nn.Module):
    """One list of layers, as models have it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Mlp(nn.Module):
    def __init__(self, gate: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = gate, up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x).tanh() * self.up_proj(x)


class Other(nn.Linear):
    """Computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(16, 16, bias=bias)


def packed_of(model: nn.Module) -> int:
    x = torch.ones(1, 3, 16)
    with torch.inference_mode():
        before = model(x)
        groups = pack_siblings(model, lambda: model(x))
        torch.testing.assert_close(model(x), before)
    return groups


def test_what_does_not_fit_is_left_alone() -> None:
    assert packed_of(Decoder(Mlp(linear(), linear()))) == 1
    assert packed_of(Decoder(Mlp(Other(16, 16), linear()))) == 0, "not a plain linear layer"
    assert packed_of(Decoder(Mlp(linear(bias=True), linear()))) == 0, "a bias in one only"
    assert packed_of(Decoder(Mlp(linear(bias=True), linear(bias=True)))) == 1
    tied = linear()
    assert packed_of(Decoder(Mlp(tied, linear()), Mlp(tied, linear()))) == 0, "one layer in two places"
    one, two = linear(), linear()
    two.weight = one.weight
    assert packed_of(Decoder(Mlp(one, linear()), Mlp(two, linear()))) == 0, "one weight in two layers"
    assert two.weight is one.weight


def test_a_model_that_cannot_do_with_them_is_put_back() -> None:
    class Peeking(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(self.up_proj) is not nn.Linear:
                raise RuntimeError("no plain layer\nin detail")
            return super().forward(x)

    model = Decoder(Peeking(linear(), linear()), Mlp(linear(), linear()))
    originals = [each for each in model.modules() if type(each) is nn.Linear]
    x = torch.randn(1, 3, 16)
    before = model(x)
    assert pack_siblings(model, lambda: model(x)) == 0
    assert [each for each in model.modules() if type(each) is nn.Linear] == originals
    assert torch.equal(model(x), before)
