"""Linear layers on cpu with int8 weights and activations quantized per token at run time.

Weights are symmetric, with one scale per output. An activation `[..., inputs]` is scaled by the largest magnitude of
its own token, so a token's result does not depend on its neighbours in the batch. Products are summed exactly in int32;
only the two operands are rounded. The product is our kernels', or FBGEMM's where there are none; docs/quantization.md
says why that one.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import fits, replacements, weights_of
from engine.model.named_weights import ALL_ROWS, SCALES, PackedModule, as_bytes
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


class Int8Weight(NamedTuple):
    """A quantized weight: it is about values * scales."""

    values: torch.Tensor
    """int8 `[outputs, inputs]`"""
    scales: torch.Tensor
    """float32 `[outputs]`"""


class Int8Linear(PackedModule):
    """`y = x W^T + b` with `W` in int8, by FBGEMM. `x` `[..., inputs]` and `y` `[..., outputs]` in bfloat16."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.values.shape
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._packed, self._scales = _pack(weight), weight.scales
        self._bias = None if bias is None else bias.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min_(_MIN_SCALE)
        product = self._product(wide / scale, 1 / _LEVELS, _ZERO_POINT, self._packed)
        y: torch.Tensor = product.mul_(scale) if self._bias is None else product.mul_(scale).add_(self._bias)
        return y.to(x.dtype)

    def unpacked(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor | None:
        """See `PackedModule`."""
        if name == "bias":
            return None if self._bias is None else self._bias[rows].to(torch.bfloat16)
        if name == "weight":
            values: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()
            return values[rows]
        return self._scales[rows] if name == SCALES else None


class KernelInt8Linear(PackedModule):
    """`Int8Linear` by our kernels, which quantize, multiply and scale in one operation."""

    def __init__(self, kernels: CpuKernels, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        values, scales = weight
        self.out_features, self.in_features = values.shape
        self._kernels, self._packed = kernels, kernels.pack(values)
        # The kernel's input is shifted by the zero point; what that adds to each output's sum is known here.
        corrections = values.to(torch.int32).sum(dim=1, dtype=torch.int32) * _ZERO_POINT
        self._scales = torch.stack((scales, corrections.view(torch.float32)))
        self._bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Int8Linear`."""
        y = self._kernels.linear_int8(x, self._packed, self._scales, self._bias)
        return y.view(*x.shape[:-1], self.out_features)

    def unpacked(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor | None:
        """See `PackedModule`."""
        if name == "weight":
            return self._kernels.unpack(self._packed, rows)
        if name == SCALES:
            return self._scales[0][rows]
        return self._bias[rows] if name == "bias" and self._bias is not None else None


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
) -> bytes:
    """Replaces all linear layers of a bfloat16 cpu model but `output`, freeing their weights as it goes; the digest of
    the new ones.

    The output layer is kept in bfloat16: no layer after it averages its errors out; see docs/quantization.md.

    `probe` runs the model and returns its logits `[..., vocabulary]`. Raises UnsupportedModelError if the model has no
    layer that can be quantized, fails with the new ones, or its logits change by more than MAX_DIFFERENCE.
    """

    def quantized_of(layers: Sequence[nn.Linear]) -> tuple[Int8Weight, torch.Tensor | None]:
        weight, bias = weights_of(layers)
        return quantized_weight(weight), bias

    before = probe().float()
    quantized, digest = _replace(model, output, quantized_of, kernels)
    why = (
        _refusal(before, probe) if quantized else "it has no linear layers of its own that could be quantized"
    )
    if why is not None:
        raise UnsupportedModelError(f"{FIELD}: int8 does not fit this model: {why}")
    _log(model, quantized)
    return digest


def quantizable(model: nn.Module, output: nn.Module | None) -> list[str]:
    """Names of the layers that `quantize_linears` replaces; also on the meta device."""
    return [name for name, module in model.named_modules() if fits(module) and module is not output]


def put_quantized(
    model: nn.Module,
    output: nn.Module | None,
    weights: dict[str, Int8Weight],
    kernels: CpuKernels | None = None,
) -> bytes:
    """Does what `quantize_linears` does, with weights by layer that were quantized elsewhere and are taken out of
    `weights`; the layers' own count for nothing but their biases."""
    names = {module: name for name, module in model.named_modules()}

    def quantized_of(layers: Sequence[nn.Linear]) -> tuple[Int8Weight, torch.Tensor | None]:
        parts = [weights.pop(names[layer]) for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = Int8Weight(*map(torch.cat, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]
        return weight, torch.cat(biases) if biases else None

    quantized, digest = _replace(model, output, quantized_of, kernels)
    _log(model, quantized)
    return digest


def _replace(
    model: nn.Module,
    output: nn.Module | None,
    quantized_of: Callable[[Sequence[nn.Linear]], tuple[Int8Weight, torch.Tensor | None]],
    kernels: CpuKernels | None,
) -> tuple[int, bytes]:
    """How many weights are int8 now, and the digest of all that was packed, in order."""
    digest = hashlib.sha256()

    def make(layers: Sequence[nn.Linear]) -> nn.Module:
        weight, bias = quantized_of(layers)
        for part in (*weight, *([] if bias is None else [bias])):
            digest.update(f"{list(part.shape)}".encode())
            digest.update(xxhash.xxh3_128_digest(as_bytes(part.contiguous()).numpy().data))
        if kernels is not None and kernels.packs_int8(weight.values):
            return KernelInt8Linear(kernels, weight, bias)
        return Int8Linear(weight, bias)

    quantized = 0
    for parent, name, replacement in replacements(model, make, kept=output):
        quantized += replacement.in_features * replacement.out_features
        setattr(parent, name, replacement)
    return quantized, digest.digest()


def _log(model: nn.Module, quantized: int) -> None:
    others = sum(parameter.numel() for parameter in model.parameters())
    log_event("engine.linears_quantized", int8_weights=quantized, other_weights=others)


def _refusal(before: torch.Tensor, probe: Callable[[], torch.Tensor]) -> str | None:
    try:
        difference = relative_difference(probe().float(), before)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None if difference <= MAX_DIFFERENCE else f"its logits differ by {difference:.3g}, relative"


def _pack(weight: Int8Weight) -> Any:
    """A weight packed for FBGEMM."""
    values, scales = weight.values, weight.scales.double()
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # Tensors of quantized types are deprecated; this product takes its weight in no other form.
        warnings.filterwarnings(
            "ignore", message=".*quantized tensor creation functions", category=UserWarning
        )
        tensor = torch._make_per_channel_quantized_tensor(values, scales, zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)


def quantized_weight(weight: torch.Tensor) -> Int8Weight:
    """A weight `[outputs, inputs]`, quantized _ROWS_AT_ONCE outputs at a time. Each output counts for itself."""
    parts = [_quantize(part) for part in weight.split(_ROWS_AT_ONCE)]
    return Int8Weight(*map(torch.cat, zip(*parts, strict=True)))


def _quantize(weight: torch.Tensor) -> Int8Weight:
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(_MIN_SCALE) / _LEVELS
    return Int8Weight((wide / scales[:, None]).round_().to(torch.int8), scales)


def is_exact() -> bool:
    """Whether a product of the largest values is exact here. Without VNNI, pairs of products saturate in 16 bits."""
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    try:
        return bool((Int8Linear(quantized_weight(ones), None)(ones) == ones.shape[1]).all())
    except (RuntimeError, AttributeError):
        return False
