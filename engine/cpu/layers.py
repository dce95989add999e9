"""A model's layers computed by the kernels. They take the place of modules that give the same."""

from __future__ import annotations

import torch
from torch import nn

from engine.cpu.kernels import CpuKernels
from engine.cpu.program import NormKind

_NORM_WIDTH = 16
_SAMPLES = 8
_MAX_DIFFERENCE = 0.002
"""Relative norm. Sums are made in another order, so now and then a value is rounded to its other neighbour."""
_EPSILONS = ("variance_epsilon", "eps")
"""What families call it."""


class KernelLinear(nn.Module):
    """`y = x W^T + b`; see `CpuKernels.linear`."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernels, self._packed = kernels, kernels.pack(weight)
        self._bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., inputs]`, y `[..., outputs]`."""
        return self._kernels.linear(x, self._packed, self._bias)


class KernelRmsNorm(nn.Module):
    """See `CpuKernels.rms_norm`."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, kind: NormKind, epsilon: float) -> None:
        super().__init__()
        self._kernels, self._weight = kernels, weight.detach()
        self._kind, self._epsilon = kind, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and y `[..., width]`."""
        return self._kernels.rms_norm(x, self._weight, self._kind, self._epsilon)


def replace_norms(model: nn.Module, kernels: CpuKernels) -> int:
    """Puts kernels in place of the norms that they compute alike; how many. Each is tried on its own first."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = _same_norm(child, kernels)
            if norm is not None:
                setattr(parent, name, norm)
                replaced += 1
    return replaced


def _same_norm(module: nn.Module, kernels: CpuKernels) -> KernelRmsNorm | None:
    parameters = dict(module.named_parameters())
    epsilon = next((vars(module)[name] for name in _EPSILONS if name in vars(module)), None)
    if set(parameters) != {"weight"} or not isinstance(epsilon, float) or list(module.children()):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype is not torch.bfloat16 or len(weight) % _NORM_WIDTH:
        return None
    sample = torch.randn(_SAMPLES, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.inference_mode():
        expected = module(sample)
        for kind in NormKind:
            norm = KernelRmsNorm(kernels, weight, kind, epsilon)
            difference = torch.linalg.vector_norm(norm(sample).float() - expected.float())
            if difference <= _MAX_DIFFERENCE * torch.linalg.vector_norm(expected.float()):
                return norm
    return None
