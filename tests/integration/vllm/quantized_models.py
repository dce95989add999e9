"""Tiny models with quantized weights, as the checkpoints of GPTQ, AWQ and compressed-tensors store them.

Only the linear layers of the decoder are quantized, in groups of `GROUP` inputs. Each comes with its reference: the
same model with the quantized weights written out in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engine.tiny_models import make_tiny_model

FAMILY = "llama_4_heads"
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns stands in each nibble of an AWQ word, the lowest first."""
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [out, in] as integers: `codes` int32 [out, in], `scales` float32 and `zeros` int32 [out, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        width = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (each.repeat_interleave(width, dim=1) for each in (self.zeros, self.scales))
        return (self.codes - zeros) * scales


def make_quantized_model(method: str, folder: Path) -> tuple[Path, Path]:
    """Saves a checkpoint of the method, one of `METHODS`, and its reference; returns both folders."""
    plain = make_tiny_model(FAMILY, folder)
    quantize, pack, settings = METHODS[method]
    stored: dict[str, torch.Tensor] = {}
    written_out: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / _WEIGHTS).items():
        if "_proj." in name:
            quantized = quantize(weight)
            written_out[name] = quantized.values()
            stored |= {
                f"{name.removesuffix('weight')}{part}": tensor.contiguous()
                for part, tensor in pack(quantized).items()
            }
        else:
            stored[name] = weight.to(torch.bfloat16)
            written_out[name] = stored[name].float()
    return (
        _saved(plain, folder / method, stored, {"dtype": "bfloat16", "quantization_config": settings}),
        _saved(plain, folder / f"{method}-reference", written_out, {}),
    )


def _saved(
    plain: Path, target: Path, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Path:
    target.mkdir()
    for file in plain.iterdir():
        if file.name not in (_WEIGHTS, "config.json"):
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text()) | dict(settings)
    (target / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), target / _WEIGHTS, {"format": "pt"})
    return target


def _symmetric(bits: int, width: int | None) -> Callable[[torch.Tensor], Quantized]:
    """Codes around the middle of `bits` bits; one scale for `width` inputs, or for a whole row."""

    def quantize(weight: torch.Tensor) -> Quantized:
        groups = weight.view(weight.shape[0], -1, width or weight.shape[1])
        middle = 2 ** (bits - 1)
        scales = (groups.abs().amax(dim=2) / (middle - 1)).to(torch.bfloat16).float()
        codes = (groups / scales[:, :, None]).round().clamp(-middle, middle - 1).to(torch.int32) + middle
        return Quantized(codes.view_as(weight), scales, torch.full_like(scales, middle, dtype=torch.int32))

    return quantize


def _asymmetric(weight: torch.Tensor) -> Quantized:
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scales = ((high - low) / 15).to(torch.bfloat16).float()
    zeros = (-low / scales).round().clamp(0, 15).to(torch.int32)
    codes = ((groups / scales[:, :, None]).round().to(torch.int32) + zeros[:, :, None]).clamp(0, 15)
    return Quantized(codes.view_as(weight), scales, zeros)


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours of the last dimension in one int32, `order[i]` in its nibble i."""
    eights = codes.view(*codes.shape[:-1], -1, 8)[..., list(order)].to(torch.int64)
    words = (eights << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(weight: Quantized) -> dict[str, torch.Tensor]:
    inputs = torch.arange(weight.codes.shape[1], dtype=torch.int32)
    return {
        "qweight": _packed(weight.codes).t(),
        "qzeros": _packed((weight.zeros - 1).t().contiguous()),
        "scales": weight.scales.t().to(torch.bfloat16),
        "g_idx": inputs // GROUP,
    }


def _awq(weight: Quantized) -> dict[str, torch.Tensor]:
    return {
        "qweight": _packed(weight.codes.t().contiguous(), AWQ_ORDER),
        "qzeros": _packed(weight.zeros.t().contiguous(), AWQ_ORDER),
        "scales": weight.scales.t().to(torch.bfloat16),
    }


def _int4(weight: Quantized) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": _packed(weight.codes),
        "weight_scale": weight.scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }


def _int8(weight: Quantized) -> dict[str, torch.Tensor]:
    return {
        "weight": (weight.codes - weight.zeros).to(torch.int8),
        "weight_scale": weight.scales.to(torch.bfloat16),
    }


def _compressed_tensors(form: str, weights: Mapping[str, Any], inputs: Any) -> dict[str, Any]:
    common = {"type": "int", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**common, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_FOUR_BITS = {"bits": 4, "group_size": GROUP}
METHODS: dict[
    str,
    tuple[
        Callable[[torch.Tensor], Quantized], Callable[[Quantized], dict[str, torch.Tensor]], dict[str, Any]
    ],
] = {
    "gptq": (
        _symmetric(4, GROUP),
        _gptq,
        {"quant_method": "gptq", "sym": True, "desc_act": False, "lm_head": False, **_FOUR_BITS},
    ),
    "awq": (_asymmetric, _awq, {"quant_method": "awq", "zero_point": True, "version": "gemm", **_FOUR_BITS}),
    "int4": (
        _symmetric(4, GROUP),
        _int4,
        _compressed_tensors(
            "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None
        ),
    ),
    "int8": (
        _symmetric(8, None),
        _int8,
        _compressed_tensors(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"},
        ),
    ),
}
"""How each quantizes, what it stores for a weight, and what stands in `quantization_config`."""
