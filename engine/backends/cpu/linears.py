"""Replaces a model's linear layers and norms by those of our kernels.

The whole model's logits are compared before and after its linear layers are replaced. If they differ, or the model
fails, every linear layer is restored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import NormKind
from splitserve.logs import log_event

MAX_DIFFERENCE = 0.02
"""Relative difference of the model's logits: another order of summation may change bfloat16 rounding."""
_NORM_WIDTH = 16
_SAMPLES = 8
_MAX_NORM_DIFFERENCE = 0.002
"""As MAX_DIFFERENCE, of one norm's results."""
_EPSILONS = ("variance_epsilon", "eps")
"""Names of the attribute epsilon in the model families."""


class KernelLinear(nn.Module):
    """`y = x W^T + b` by our kernels; see `CpuKernels.linear`."""

    def __init__(self, kernels: CpuKernels, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        self._kernels, self._packed = kernels, kernels.pack(layer.weight)
        self._bias = None if layer.bias is None else layer.bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., inputs]`, y `[..., outputs]`."""
        return self._kernels.linear(x, self._packed, self._bias)


def replace_linears(model: nn.Module, probe: Callable[[], torch.Tensor], kernels: CpuKernels) -> bool:
    """Replaces a bfloat16 cpu model's linear layers where the kernels support their shapes.

    `probe` runs the model and returns its logits `[..., vocabulary]`. Returns False, logs why, and leaves the model as
    it was, if the new layers change the logits by more than MAX_DIFFERENCE.
    """
    before = probe().float()
    originals: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear and kernels.packs(child.weight):
                originals.append((parent, name, child))
                setattr(parent, name, KernelLinear(kernels, child))
    try:
        difference = relative_difference(probe().float(), before)
        if difference <= MAX_DIFFERENCE:
            return True
        why = f"logits differ by {difference:.3g}"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        why = str(error).partition("\n")[0]
    for parent, name, original in originals:
        setattr(parent, name, original)
    log_event("engine.linears_not_packed", why=why)
    return False


def relative_difference(after: torch.Tensor, before: torch.Tensor) -> float:
    """Norm of the difference over the norm of `before`; NaN if either is not finite."""
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before))


class KernelRmsNorm(nn.Module):
    """Root mean square norm by our kernels; see `CpuKernels.rms_norm`."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, kind: NormKind, epsilon: float) -> None:
        super().__init__()
        self._kernels, self._weight = kernels, weight.detach()
        self._kind, self._epsilon = kind, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and y `[..., width]`."""
        return self._kernels.rms_norm(x, self._weight, self._kind, self._epsilon)


def replace_norms(model: nn.Module, kernels: CpuKernels) -> int:
    """Replaces the norms that the kernels compute equally, as tested on a sample each; returns their number."""
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
            if relative_difference(norm(sample).float(), expected.float()) <= _MAX_NORM_DIFFERENCE:
                return norm
    return None
