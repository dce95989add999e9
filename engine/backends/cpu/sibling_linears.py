"""Linear layers that share one product: query, key and value of an attention layer; gate and up of an MLP.

Siblings with known names in one parent get the same input, so their weights can be one matrix. The model's own code
does not change: each sibling stays a module and returns its slice of the product. A parent that calls its children in
another order still gets correct results, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from splitserve.logs import log_event

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of children that get the same input in one forward pass, in the order in which they are called."""


class SharedProduct:
    """One product for several siblings, computed when the first of them is called."""

    def __init__(self, linear: Callable[[torch.Tensor], torch.Tensor], sizes: list[int]) -> None:
        """`linear` computes the outputs of all siblings, beside each other; `sizes`: number of outputs of each."""
        self._linear, self._sizes = linear, sizes
        self._input: torch.Tensor | None = None
        self._slices: list[torch.Tensor] = []

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The outputs of the sibling at `index`, a view."""
        if x is not self._input:
            self._input = x
            self._slices = list(self._linear(x).split(self._sizes, dim=-1))
        part = self._slices[index]
        if index == len(self._sizes) - 1:
            self._input, self._slices = None, []  # the last sibling: keep nothing of a step alive after it
        return part


class LinearSlice(nn.Module):
    """One sibling's part of a `SharedProduct`."""

    def __init__(self, shared: SharedProduct, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._shared, self._index = shared, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` to this sibling's `[..., outputs]`, a view into the shared result."""
        return self._shared.take(self._index, x)


def sibling_groups(children: dict[str, nn.Linear]) -> Iterator[tuple[tuple[str, ...], list[nn.Linear]]]:
    """The groups of siblings among the linear layers of one parent, with their names."""
    for names in SIBLINGS:
        layers = [children[name] for name in names if name in children]
        if len(layers) == len(names) and _can_join(layers):
            yield names, layers


def joined(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight `[all outputs, inputs]` and one bias `[all outputs]`, copies."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return weight, torch.cat(biases) if biases else None


def relative_difference(after: torch.Tensor, before: torch.Tensor) -> float:
    """Norm of the difference over the norm of `before`; NaN if either is not finite."""
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before))


def kept(
    originals: Sequence[tuple[nn.Module, str, nn.Module]],
    before: torch.Tensor,
    probe: Callable[[], torch.Tensor],
    allowed: float,
) -> bool:
    """Whether the model still computes the logits `before`, within the relative difference `allowed`.

    If it does not, puts the `originals`, (parent, child name, layer), back and logs why.
    """
    try:
        difference = relative_difference(probe().float(), before)
        if difference <= allowed:
            return True
        why = f"logits differ by {difference:.3g}"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        why = str(error).partition("\n")[0]
    for parent, name, original in originals:
        setattr(parent, name, original)
    log_event("engine.linears_not_packed", why=why)
    return False


def _can_join(layers: list[nn.Linear]) -> bool:
    return len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) == 1
