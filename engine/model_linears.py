"""Other linear layers in place of a model's own: weights packed for oneDNN here, int8 in `engine.int8_linears`.

A layer that sits in its parent under a known name next to its siblings (query, key, value; gate, up) shares
one product with them. Nothing of the model's own code changes: each sibling stays a module of its own and
takes its slice, so any parent that calls its children one by one works, and one that does something else
still gets right results, only slower. The whole model is compared before and after; if it differs or fails,
every layer is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from engine.cpu.kernels import CpuKernels
from engine.cpu.layers import KernelLinear
from splitserve.logs import log_event

MakeLayer = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""From a weight `[outputs, inputs]` and a bias `[outputs]`, both in bfloat16, to the layer that computes with them."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of children that get the same input in one forward pass, in the order in which they are called."""
MAX_DIFFERENCE = 0.02
"""Relative norm. The packed product sums in the same order here; elsewhere bfloat16 rounding may differ."""


class PackedLinear(nn.Module):
    """`y = x W^T + b` with the weight in oneDNN's own layout. `x` `[..., inputs]`, `y` `[..., outputs]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


class _SharedProduct:
    """One product for several siblings, computed when the first of them is called."""

    def __init__(self, layers: list[nn.Linear], make: MakeLayer) -> None:
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat([b.detach() for b in biases]) if biases else None
        self._linear = make(torch.cat([layer.weight.detach() for layer in layers]), bias)
        self._sizes = [layer.out_features for layer in layers]
        self._input: torch.Tensor | None = None
        self._slices: list[torch.Tensor] = []

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            self._input = x
            self._slices = list(self._linear(x).split(self._sizes, dim=-1))
        part = self._slices[index]
        if index == len(self._sizes) - 1:
            self._input, self._slices = None, []  # nothing of a step is kept alive after it
        return part


class LinearSlice(nn.Module):
    """One sibling's part of a shared product."""

    def __init__(self, shared: _SharedProduct, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._shared, self._index = shared, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` to this sibling's `[..., outputs]`, a view into the shared result."""
        return self._shared.take(self._index, x)


def pack_linears(
    model: nn.Module, probe: Callable[[], torch.Tensor], kernels: CpuKernels | None = None
) -> bool:
    """Replaces a bfloat16 cpu model's linear layers, by those of the kernels where they fit; whether it did.

    `probe` runs the model and returns its logits `[..., vocabulary]`.
    """

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
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
    try:
        after = probe().float()
        difference = relative_difference(after, before)
        why = None if difference <= MAX_DIFFERENCE else f"logits differ by {difference:.3g}"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        why = str(error).partition("\n")[0]
    if why is None:
        return True
    for parent, name, original in originals:
        setattr(parent, name, original)
    log_event("engine.linears_not_packed", why=why)
    return False


def relative_difference(after: torch.Tensor, before: torch.Tensor) -> float:
    """Norm of the difference over the norm of `before`; NaN where one is not finite."""
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before))


def replacements(
    model: nn.Module, make: MakeLayer, kept: nn.Module | None = None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, child name, new module) for every linear layer in bfloat16 but `kept`, siblings one after the other.

    Between two parents nothing of the layers is held here, so that whoever puts the new modules in place at once
    has the weights of one parent twice, not those of the model.
    """
    for parent in list(model.modules()):
        children = {
            name: child for name, child in parent.named_children() if _fits(child) and child is not kept
        }
        for names in SIBLINGS:
            layers = [children[name] for name in names if name in children]
            if len(layers) == len(names) and _alike(layers):
                shared = _SharedProduct(layers, make)
                for index, name in enumerate(names):
                    yield parent, name, LinearSlice(shared, index, children.pop(name))
        for name, layer in children.items():
            yield (
                parent,
                name,
                make(layer.weight.detach(), None if layer.bias is None else layer.bias.detach()),
            )


def _fits(module: nn.Module) -> Any:
    # Subclasses may compute something else.
    return type(module) is nn.Linear and module.weight.dtype is torch.bfloat16


def _alike(layers: list[nn.Linear]) -> bool:
    inputs = {layer.in_features for layer in layers}
    return len(inputs) == 1 and len({layer.bias is None for layer in layers}) == 1
