"""Replaces a model's linear layers and norms by faster ones: our kernels', or weights packed for oneDNN.

Siblings share one product; see `engine.backends.cpu.sibling_linears`. The whole model's logits are compared before and
after. If they differ, or the model fails, every layer is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import NormKind
from engine.backends.cpu.sibling_linears import LinearSlice, SharedProduct, joined, kept, sibling_groups

MakeLayer = Callable[[Sequence[nn.Linear]], nn.Module]
"""Joins several layers to one with their outputs beside each other; see `weights_of`."""
MAX_DIFFERENCE = 0.02
"""Relative difference of the model's logits: another order of summation may change bfloat16 rounding."""


class PackedLinear(nn.Module):
    """`y = x W^T + b` with the weight in oneDNN's own layout. `x` `[..., inputs]`, `y` `[..., outputs]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., inputs]`, y `[..., outputs]`."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def pack_linears(
    model: nn.Module, probe: Callable[[], torch.Tensor], kernels: CpuKernels | None = None
) -> bool:
    """Replaces a bfloat16 cpu model's linear layers, by those of `kernels` where they support the shape.

    `probe` runs the model and returns its logits `[..., vocabulary]`. Returns False, and leaves the model as it was, if
    oneDNN has no bfloat16 product here or the new layers change the logits by more than MAX_DIFFERENCE.
    """

    def make(layers: Sequence[nn.Linear]) -> nn.Module:
        weight, bias = weights_of(layers)
        if kernels is not None and kernels.packs(weight):
            return KernelLinear(kernels, weight, bias)
        return PackedLinear(weight, bias)

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    before = probe().float()
    originals: list[tuple[nn.Module, str, nn.Module]] = []
    for parent, name, replacement in replacements(model, make):
        originals.append((parent, name, getattr(parent, name)))
        setattr(parent, name, replacement)
    return kept(originals, before, probe, MAX_DIFFERENCE)


def replacements(model: nn.Module, make: MakeLayer) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields (parent, child name, new module) for every bfloat16 linear layer, siblings consecutively.

    Keeps no layer from one parent to the next: a caller that puts each module in place at once has the weights of one
    parent twice in memory, not those of the whole model.
    """
    for parent in list(model.modules()):
        children = {name: child for name, child in parent.named_children() if fits(child)}
        for names, layers in sibling_groups(children):
            shared = SharedProduct(make(layers), [layer.out_features for layer in layers])
            del layers
            for index, name in enumerate(names):
                yield parent, name, LinearSlice(shared, index, children.pop(name))
        for name, layer in children.items():
            yield parent, name, make([layer])


def weights_of(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight `[all outputs, inputs]` and the bias `[all outputs]` of layers; of one, its own."""
    if len(layers) > 1:
        return joined(layers)
    (layer,) = layers
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def fits(module: nn.Module) -> bool:
    """Whether a module is a bfloat16 linear layer that may be replaced."""
    # Subclasses may compute something else.
    return type(module) is nn.Linear and module.weight.dtype is torch.bfloat16


_NORM_WIDTH = 16
_SAMPLES = 8
_MAX_DIFFERENCE = 0.002
"""Maximum relative norm of the difference: another order of summation may round a value to its other neighbour."""
_EPSILONS = ("variance_epsilon", "eps")
"""Names of the attribute epsilon in the model families."""


class KernelLinear(nn.Module):
    """`y = x W^T + b` by our kernels; see `CpuKernels.linear`."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernels, self._packed = kernels, kernels.pack(weight)
        self._bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., inputs]`, y `[..., outputs]`."""
        return self._kernels.linear(x, self._packed, self._bias)


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
            difference = torch.linalg.vector_norm(norm(sample).float() - expected.float())
            if difference <= _MAX_DIFFERENCE * torch.linalg.vector_norm(expected.float()):
                return norm
    return None
