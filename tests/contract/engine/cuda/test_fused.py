"""Fused kernels give what each family's own modules give; what they do not is left to the modules."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.model.attention_interface import ATTENTION_NAME, AttentionContext, bind_layers
from engine.model.sibling_linears import pack_siblings
from tests.support.engine.runner_driver import (
    drive,
    make_sequences,
    prompt_of,
    reference,
    runner_of,
    tokens_of,
)
from tests.support.engine.tiny_models import CONTEXT, FAMILIES, make_tiny_model
from tests.support.engine.triton_interpreter import triton_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
KINDS = {"gemma2": "one_plus", "gemma3_text": "one_plus", "olmo2": "scaled"}
"""Of each family's norms; of all others they are "rounded"."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with nullcontext() if DEVICE.type == "cuda" else triton_interpreter():
        yield


def loaded(family: str, folder: Path, dtype: torch.dtype) -> tuple[Any, AttentionContext]:
    """With packed linear layers, and norms whose weights are not all the same."""
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(family, folder), dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    numbers = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.data += 0.3 * torch.randn(weight.shape, generator=numbers).to(dtype)
    context = AttentionContext()
    bind_layers(model, context, None)
    model.eval().to(DEVICE)
    pack_siblings(model, lambda: torch.ones(1))
    return model, context


def fused_parts(model: nn.Module) -> list[Any]:
    from engine.backends.cuda.fused.forward import FusedForward

    forwards = [vars(part).get("forward") for part in model.modules()]
    return [forward for forward in forwards if isinstance(forward, FusedForward)]


def random_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=numbers)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.bfloat16) for family in FAMILIES), ("olmo2", torch.float32)]
)
def test_modules_of_every_family(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from engine.backends.cuda.fused.install import MAX_DEVIATIONS, fuse, unfuse
    from engine.model.probe import probe_logits

    model, context = loaded(family, tmp_path, dtype)
    names, before = list(model.state_dict()), probe_logits(model, context)
    layers = model.config.num_hidden_layers
    norms = sum("Norm" in type(part).__name__ for part in model.modules())
    count = fuse(model, context)
    assert count == norms + layers * (1 if family == "mixtral" else 2), "norms, attention, feed-forward"
    parts = fused_parts(model)
    kind = KINDS.get(family, "rounded") if dtype is torch.bfloat16 else "rounded"  # the same in float32
    assert {part._kind for part in parts if "_kind" in vars(part)} == {kind}
    with torch.inference_mode():
        for part in {type(part.module): part for part in parts}.values():
            if "_kind" in vars(part) or "_halves" in vars(part):
                width = len(part._weight) if "_kind" in vars(part) else model.config.hidden_size
                for tokens in (1, 5):
                    x = random_of(1, tokens, width, dtype=dtype, seed=tokens)
                    assert part.difference(x) <= MAX_DEVIATIONS[dtype]
    assert fuse(model, context) == 0, "once is enough"
    assert list(model.state_dict()) == names
    unfuse(model)
    assert not fused_parts(model)
    assert torch.equal(probe_logits(model, context), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    prompts = [prompt_of(7)]
    runner = runner_of(tmp_path, family, device=str(DEVICE), attention_backend="triton", cuda_graphs="off")
    assert fused_parts(runner._forward._module)  # type: ignore[attr-defined]
    assert tokens_of(drive(runner, make_sequences(prompts, 2), 2, CONTEXT)) == reference(
        tmp_path, family, prompts, 2
    )


def test_off_with_attention_in_torch(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "llama", device=str(DEVICE), attention_backend="torch")
    assert not fused_parts(runner._forward._module)  # type: ignore[attr-defined]


class Cut(nn.Module):
    """A norm with an attribute and a weight as others have."""

    def __init__(self, width: int = 20, after: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_of(width, seed=9))
        self.eps = 1e-5
        self._after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self._after(self.weight * wide.to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 128, 1000])
def test_norms_of_any_rows(width: int, dtype: torch.dtype) -> None:
    """Of slices of a wider product, of heads in both orders, of one row; in the memory order of the input."""
    from engine.backends.cuda.fused.forward import deviation
    from engine.backends.cuda.fused.install import MAX_DEVIATIONS
    from engine.backends.cuda.fused.rms_norm import fused_norms

    norm = Cut(width).to(DEVICE, dtype)
    fused = fused_norms(norm)[0]
    wide = random_of(1, 5, 3 * width + 7, dtype=dtype)
    heads = wide[..., : 3 * width].unflatten(-1, (3, width))
    views = [
        wide[..., :width],
        wide[:, :1, :width],
        heads,
        heads.transpose(1, 2),
        heads[0, 0],
        heads[0, 0, 0],
    ]
    with torch.inference_mode():
        for view in views:
            found = fused(view)
            assert deviation(found, norm.forward(view)) <= MAX_DEVIATIONS[dtype], view.shape
        assert not fused.fits(wide[..., : 2 * width : 2]) or width == 1
        own = wide[..., : 2 * width : 2]
        assert torch.equal(fused(own), norm.forward(own)), "left to the module"
        assert fused(wide[:, :0, :width]).shape == (1, 0, width)


def test_a_broken_row_is_the_only_one() -> None:
    from engine.backends.cuda.fused.gated import gated
    from engine.backends.cuda.fused.rms_norm import fused_norms

    x = random_of(1, 4, 20)
    x[0, 1, 3] = float("nan")
    x[0, 2, 3] = float("inf")
    norm = Cut().to(DEVICE)
    with torch.inference_mode():
        for found in (fused_norms(norm)[0](x), gated(x, x, "silu"), gated(x, x, "gelu_tanh")):
            assert found[0, [0, 3]].isfinite().all()
            assert found[0, 1].isnan().any()
            assert not found[0, 2].isfinite().all()


def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """As `transformers` has it, with heads of which only a part is turned."""

    def half(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((-high, low), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    size = cos.shape[-1]
    return tuple(
        torch.cat([(x[..., :size] * cos) + (half(x[..., :size]) * sin), x[..., size:]], dim=-1).to(x.dtype)
        for x in (q, k)
    )


@pytest.mark.parametrize("between", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(4, 2, 16, 16), (3, 1, 20, 20), (9, 3, 8, 4), (1, 1, 96, 24), (7, 7, 8, 2)],
)
def test_rotations_are_the_same_to_the_bit(
    heads: int, kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype, between: torch.dtype
) -> None:
    from engine.backends.cuda.fused.rotary import fits, rotate

    for tokens in (1, 6):
        product = random_of(1, tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        split = product.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        given = (
            split[:, :heads],
            split[:, heads : heads + kv_heads],
            random_of(1, tokens, rotated, dtype=between, seed=2),
            random_of(1, tokens, rotated, dtype=between, seed=3),
        )
        if (dtype, between) == (torch.float32, torch.bfloat16):
            assert not fits(*given), "torch's result would be in float32 of what was rounded"
            return
        before = product.clone()
        for found, expected in zip(rotate(*given), turned(*given), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(product, before), "nothing is written in place"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 48, 1024, 1500])
def test_gated_products_of_halves(width: int, dtype: torch.dtype) -> None:
    from engine.backends.cuda.fused.forward import deviation
    from engine.backends.cuda.fused.gated import gated
    from engine.backends.cuda.fused.install import MAX_DEVIATIONS

    own = {"silu": nn.SiLU(), "gelu_tanh": nn.GELU(approximate="tanh")}
    for tokens in (1, 3):
        gate, up = random_of(1, tokens, 2 * width, dtype=dtype).chunk(2, dim=-1)
        for name, activation in own.items():
            assert deviation(gated(gate, up, name), activation(gate) * up) <= MAX_DEVIATIONS[dtype]


class FeedForward(nn.Module):
    def __init__(self, activation: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down_proj, self.act_fn, self.scale = nn.Linear(24, 16), activation, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Bounded(FeedForward):
    """As some families have it: the same as others until gate or up are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(gate.clamp(max=16.0) * up.clamp(-16.0, 16.0))


def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Turns neighbours, not halves."""

    def swapped(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return tuple(x * cos.unsqueeze(1) + swapped(x) * sin.unsqueeze(1) for x in (q, k))


class Neighbours(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        cos, sin = random_of(1, x.shape[1], 8, seed=1), random_of(1, x.shape[1], 8, seed=2)
        q, k = apply_rotary_pos_emb(heads, heads, cos, sin)
        return (q + k).transpose(1, 2).flatten(2)


class Logits:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Model(nn.Module):
    """One part of a model, as the probe calls it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.embed = part, nn.Embedding(20, 16)

    def forward(self, input_ids: torch.Tensor, **_options: Any) -> Logits:
        return Logits(self.part(self.embed(input_ids)))


DIFFERENT = {
    "norm": lambda: Cut(16, lambda y: y + 1e-3),
    "rotary": Neighbours,
    "activation": lambda: FeedForward(nn.ReLU()),
    "exact gelu": lambda: FeedForward(nn.GELU()),
    "output": lambda: FeedForward(nn.SiLU(), scale=1.001),
    "bounds": lambda: Bounded(nn.SiLU()),
    "layer norm": lambda: nn.LayerNorm(16, bias=False),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_left_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    from engine.backends.cuda.fused.install import fuse

    torch.manual_seed(0)
    model = Model(DIFFERENT[name]()).to(DEVICE)
    with caplog.at_level(logging.INFO):
        assert fuse(model, AttentionContext()) == 0
    assert not fused_parts(model)
    assert "engine.module_not_fused" in caplog.messages


def test_what_is_the_same_is_not() -> None:
    from engine.backends.cuda.fused.install import fuse

    torch.manual_seed(0)
    for part in (Cut(16), FeedForward(nn.SiLU()), FeedForward(nn.GELU(approximate="tanh"))):
        assert fuse(Model(part).to(DEVICE), AttentionContext()) == 1


def test_a_kernel_that_fails_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backends.cuda.fused import rms_norm
    from engine.backends.cuda.fused.install import fuse

    def broken(*_given: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nin detail")

    monkeypatch.setattr(rms_norm, "rms_norm", broken)
    model, context = loaded("llama", tmp_path, torch.float32)
    with caplog.at_level(logging.INFO):
        assert fuse(model, context) == 4
    assert Counter(type(part.module).__name__ for part in fused_parts(model)) == {
        "LlamaAttention": 2,
        "LlamaMLP": 2,
    }


def test_a_model_that_gives_something_else_with_them_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backends.cuda.fused import install

    monkeypatch.setattr(install, "MAX_LOGITS_DIFFERENCES", {torch.float32: -1.0})
    model, context = loaded("llama", tmp_path, torch.float32)
    with caplog.at_level(logging.INFO):
        assert install.fuse(model, context) == 0
    assert not fused_parts(model)
    assert "engine.fused_kernels_off" in caplog.messages
