"""Packed and fused linear layers give each family's own logits; what does not fit is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.backends.cpu.linears import PackedLinear, pack_linears
from engine.backends.cpu.sibling_linears import LinearSlice
from tests.support.engine.tiny_models import FAMILIES, make_tiny_model

needs_packing = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 products"
)


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_stay(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = torch.arange(1, 40).unsqueeze(0)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=tokens, use_cache=False).logits

    before = logits().float()
    assert pack_linears(model, logits)
    assert any(isinstance(module, (PackedLinear, LinearSlice)) for module in model.modules())
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for _ in range(2):  # nothing of one pass may reach the next
        torch.testing.assert_close(logits().float(), before, rtol=0.05, atol=0.05)


@needs_packing
def test_siblings_called_in_another_order_or_with_other_inputs_are_right() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size).bfloat16() for size in (32, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = x + 1
            return torch.cat([self.v_proj(x), self.k_proj(other), self.q_proj(x), self.q_proj(other)], dim=-1)

    torch.manual_seed(1)
    parent, x = Parent().eval(), torch.randn(1, 5, 32).bfloat16()
    with torch.inference_mode():
        before = parent(x)
        assert pack_linears(parent, lambda: parent(x))
        assert isinstance(parent.q_proj, LinearSlice)
        torch.testing.assert_close(parent(x), before)


@needs_packing
def test_a_model_that_cannot_do_with_them_is_put_back() -> None:
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to(self.layer.weight.dtype))

    model, x = Peeking().eval(), torch.randn(1, 5, 32).bfloat16()
    original = model.layer
    with torch.inference_mode():
        assert not pack_linears(model, lambda: model(x))
    assert model.layer is original
