"""Linear layers on cpu with int8 weights and activations quantized per token at run time.

Weights are symmetric, with one scale per output. An activation `[..., inputs]` is scaled by the largest magnitude of
its own token, so a token's result does not depend on its neighbours in the batch. Products are summed exactly in int32;
only the two operands are rounded. The product is our kernels', or FBGEMM's where there are none; docs/quantization.md
says why that one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import replacements
from engine.model.sibling_linears import relative_difference
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnsupportedModelError
from splitserve.logs import log_event

FIELD = "engine.quantization"
MAX_DIFFERENCE = 0.5
"""Of the whole model's logits, relative norm. Quantization stays below 0.1; a layer that its model uses for something
else than a product does not."""
_LEVELS = 127
_ZERO_POINT = 128
"""Activations are unsigned in the product: -1 becomes 1, 0 becomes 128, 1 becomes 255."""
_ROWS_AT_ONCE = 4096
"""Outputs quantized at a time, which bounds the memory for float32 copies of their weights."""
_MIN_SCALE = 1e-30
"""Lower bound of scales, for tokens and weights that are all zeros."""


class Int8Linear(nn.Module):
    """`y = x W^T + b` with `W` in int8, by FBGEMM. `x` `[..., inputs]` and `y` `[..., outputs]` in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._packed = _pack(weight)
        self._bias = None if bias is None else bias.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min_(_MIN_SCALE)
        product = self._product(wide / scale, 1 / _LEVELS, _ZERO_POINT, self._packed)
        y: torch.Tensor = product.mul_(scale) if self._bias is None else product.mul_(scale).add_(self._bias)
        return y.to(x.dtype)


class KernelInt8Linear(nn.Module):
    """`Int8Linear` by our kernels, which quantize, multiply and scale in one operation."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        values, scales = _quantize_all(weight)
        self._kernels, self._packed = kernels, kernels.pack(values)
        # The kernel's input is shifted by the zero point; what that adds to each output's sum is known here.
        corrections = values.to(torch.int32).sum(dim=1, dtype=torch.int32) * _ZERO_POINT
        self._scales = torch.stack((scales.float(), corrections.view(torch.float32)))
        self._bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Int8Linear`."""
        y = self._kernels.linear_int8(x, self._packed, self._scales, self._bias)
        return y.view(*x.shape[:-1], self.out_features)


def check_quantization(config: EngineConfig, dtype: str, device: torch.device) -> None:
    """Raises ConfigError (`engine.quantization`) with the reason if this engine does not support what is configured."""
    if config.quantization == "none":
        return
    why = None
    if device.type != "cpu":
        why = f"is for cpu; this engine runs on {device.type}"
    elif dtype != "bfloat16":
        why = f"goes with bfloat16; this engine's dtype is {dtype}"
    elif not is_exact():
        why = "needs a processor with int8 products (AVX-512 VNNI) and a torch with FBGEMM"
    if why is not None:
        raise ConfigError(f"{FIELD}: {config.quantization} {why}", field=FIELD)


def quantize_linears(
    model: nn.Module,
    output: nn.Module | None,
    probe: Callable[[], torch.Tensor],
    kernels: CpuKernels | None = None,
) -> None:
    """Replaces all linear layers of a bfloat16 cpu model but `output`, freeing their weights as it goes.

    The output layer is kept in bfloat16: no layer after it averages its errors out; see docs/quantization.md.

    `probe` runs the model and returns its logits `[..., vocabulary]`. Raises UnsupportedModelError if the model has no
    layer that can be quantized, fails with the new ones, or its logits change by more than MAX_DIFFERENCE.
    """

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        if kernels is not None and kernels.packs_int8(weight):
            return KernelInt8Linear(kernels, weight, bias)
        return Int8Linear(weight, bias)

    before = probe().float()
    quantized = 0
    for parent, name, replacement in replacements(model, make, kept=output):
        quantized += replacement.in_features * replacement.out_features
        setattr(parent, name, replacement)
    why = (
        _refusal(before, probe) if quantized else "it has no linear layers of its own that could be quantized"
    )
    if why is not None:
        raise UnsupportedModelError(f"{FIELD}: int8 does not fit this model: {why}")
    others = sum(parameter.numel() for parameter in model.parameters())
    log_event("engine.linears_quantized", int8_weights=quantized, other_weights=others)


def _refusal(before: torch.Tensor, probe: Callable[[], torch.Tensor]) -> str | None:
    try:
        difference = relative_difference(probe().float(), before)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None if difference <= MAX_DIFFERENCE else f"its logits differ by {difference:.3g}, relative"


def _pack(weight: torch.Tensor) -> Any:
    """A weight `[outputs, inputs]`, quantized and packed for FBGEMM."""
    values, scales = _quantize_all(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # Tensors of quantized types are deprecated; this product takes its weight in no other form.
        warnings.filterwarnings(
            "ignore", message=".*quantized tensor creation functions", category=UserWarning
        )
        tensor = torch._make_per_channel_quantized_tensor(values, scales, zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)


def _quantize_all(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_quantize` applied to _ROWS_AT_ONCE outputs at a time."""
    parts = [_quantize(part) for part in weight.split(_ROWS_AT_ONCE)]
    values, scales = (torch.cat(halves) for halves in zip(*parts, strict=True))
    return values, scales


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values `[outputs, inputs]` and float64 scales `[outputs]`, so that weight ~ values * scales."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(_MIN_SCALE) / _LEVELS
    return (wide / scales[:, None]).round_().to(torch.int8), scales.double()


def is_exact() -> bool:
    """Whether a product of the largest values is exact here. Without VNNI, pairs of products saturate in 16 bits."""
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    try:
        return bool((Int8Linear(ones, None)(ones) == ones.shape[1]).all())
    except (RuntimeError, AttributeError):
        return False
