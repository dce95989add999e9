"""The activation of a gate times what it gates, in one kernel; gate and up may be halves of one packed product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import nn

from engine.backends.cuda.fused.forward import (
    DTYPES,
    FusedUnary,
    deviation,
    has_own_forward,
    is_one_row_of_tokens,
    rounded,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
SILU = tl.constexpr(ACTIVATIONS["silu"])
TWICE_ROOT_2_OVER_PI = tl.constexpr(2 * 0.7978845608028654)
CUBED = tl.constexpr(0.044715)
ELEMENTS = 1024
"""Of a program."""
WARPS = 4
LARGE = 100.0
"""The largest gate or up of a comparison."""
DOWN = "down_proj"
SEPARATE, PACKED = ("gate_proj", "up_proj"), "gate_up_proj"
"""Names of the children of gated feed-forward layers."""


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate,
    up,
    y,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """A part of a token's row. Grid: tokens, parts."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = places < WIDTH
    gates = tl.load(gate + token * gate_stride + places, mask=mask, other=0.0)
    ups = tl.load(up + token * up_stride + places, mask=mask, other=0.0)
    wide = gates.to(tl.float32)
    # gelu's 0.5 (1 + tanh(z)) is the sigmoid of 2 z.
    turned = wide
    if ACTIVATION != SILU:
        turned = TWICE_ROOT_2_OVER_PI * (wide + CUBED * (wide * wide * wide))
    active = rounded(tl.div_rn(wide, 1.0 + tl.exp(-turned)), gates.dtype).to(tl.float32)
    result = rounded(active * ups.to(tl.float32), gates.dtype)
    tl.store(y + token * WIDTH + places, result, mask=mask)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up of `[1, tokens, width]` or `[tokens, width]`, contiguous; each rounded to the dtype, as
    torch does. Vectors of both are contiguous, rows need not be."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tokens, width = gate.shape[-2:]
    _gated[(tokens, triton.cdiv(width, ELEMENTS))](
        gate,
        up,
        y,
        gate.stride(-2),
        up.stride(-2),
        ACTIVATION=ACTIVATIONS[activation],
        WIDTH=width,
        ELEMENTS=ELEMENTS,
        num_warps=WARPS,
        enable_fp_fusion=False,  # as the model's own operations round
    )
    return y


class FusedFeedForward(FusedUnary):
    """The forward pass of `down(activation(gate(x)) * up(x))`; `halves` gives gate(x) and up(x)."""

    def __init__(
        self,
        module: nn.Module,
        halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        activation: str,
    ) -> None:
        super().__init__(module)
        self._halves, self._activation = halves, activation

    def fits(self, x: torch.Tensor) -> bool:
        """See `FusedUnary`; what the linear layers give is looked at by `compute`."""
        return x.dtype in DTYPES and is_one_row_of_tokens(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """See `FusedUnary`."""
        gate, up = self._halves(x)
        if not is_one_row_of_tokens(gate) or not is_one_row_of_tokens(up, gate):
            result: torch.Tensor = self.own(x)
            return result
        down: torch.Tensor = getattr(self.module, DOWN)(gated(gate, up, self._activation))
        return down

    def difference(self, x: torch.Tensor) -> float:
        """Of what the down layer is given, as its product would hide or add roundings; and of its result from the
        module's own, which may do more. Also for inputs that make gate and up large: some families bound those."""
        if not self.fits(x):
            return float("inf")
        largest = max(float(half.abs().max()) for half in self._halves(x))
        return max(self._difference(each) for each in (x, x * (LARGE / max(largest, 1e-6))))

    def _difference(self, x: torch.Tensor) -> float:
        down = getattr(self.module, DOWN)
        given: list[torch.Tensor] = []
        hook = down.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0]))
        try:
            expected = self.own(x)
        finally:
            hook.remove()
        gate, up = self._halves(x)
        if len(given) != 1 or not is_one_row_of_tokens(gate) or not is_one_row_of_tokens(up, gate):
            return float("inf")
        product = gated(gate, up, self._activation)
        return max(deviation(product, given[0]), deviation(down(given[0]), expected))


def fused_feed_forwards(module: nn.Module) -> list[FusedUnary]:
    """For a module that may be a gated feed-forward layer, its forward pass by each activation; else none."""
    names = {name for name, _ in module.named_children()}
    if DOWN not in names or not has_own_forward(module):
        return []
    if names.issuperset(SEPARATE):
        halves = _separate(module)
    elif PACKED in names:
        halves = _packed(module)
    else:
        return []
    return [FusedFeedForward(module, halves, activation) for activation in ACTIVATIONS]


def _separate(module: nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    gate, up = (getattr(module, name) for name in SEPARATE)
    return lambda x: (gate(x), up(x))


def _packed(module: nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    both = getattr(module, PACKED)

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = both(x).chunk(2, dim=-1)
        return gate, up

    return halves
