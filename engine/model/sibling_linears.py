"""Linear layers that share one product: query, key and value of an attention layer; gate and up of an MLP.

Siblings with known names in one parent get the same input, so their weights can be one matrix. The model's own code
does not change: each sibling stays a module and returns its slice of the product. A parent that calls its children in
another order still gets correct results, only slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from splitserve.logs import log_event

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of children that get the same input in one forward pass, in the order in which they are called."""
MAX_DIFFERENCES = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Maximum relative difference of the model's logits: a product with more outputs may be summed in another order."""


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


class PackedSlice(LinearSlice):
    """A `LinearSlice` that keeps the names of its layer's parameters, which are views of the packed ones."""

    def __init__(self, shared: SharedProduct, index: int, layer: nn.Linear) -> None:
        super().__init__(shared, index, layer)
        self.weight, self.bias = layer.weight, layer.bias


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


def pack_siblings(model: nn.Module, probe: Callable[[], torch.Tensor]) -> int:
    """Joins the weights of each group of siblings, one decoder layer at a time; returns the number of groups.

    The layers' own weights become views, so names and values stay, and only one decoder layer is in memory twice.
    Subclasses of Linear, which may compute something else, and weights that several modules share stay as they are.
    `probe` runs the model and returns its logits `[..., vocabulary]`. If they change by more than MAX_DIFFERENCES, or
    the model fails, every layer is restored, and 0 is returned.
    """
    before = probe().float()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    originals: list[tuple[nn.Module, str, nn.Linear]] = []
    packed = 0
    for unit in _decoder_layers(model):
        groups = list(_groups(unit, uses))
        if groups:
            _move([module for module in unit.modules() if _is_own(module, uses)])
        for parent, names, layers in groups:
            originals += [(parent, name, layer) for name, layer in zip(names, layers, strict=True)]
            for name, part in zip(names, _packed(layers), strict=True):
                setattr(parent, name, part)
        packed += len(groups)
    if not packed:
        return 0
    allowed = max(MAX_DIFFERENCES[layer.weight.dtype] for _, _, layer in originals)
    return packed if kept(originals, before, probe, allowed) else 0


def _packed(layers: list[nn.Linear]) -> list[PackedSlice]:
    weight, bias = joined(layers)
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight.data = part
    if bias is not None:
        for layer, part in zip(layers, bias.split(sizes), strict=True):
            layer.bias.data = part
    shared = SharedProduct(lambda x: nn.functional.linear(x, weight, bias), sizes)
    return [PackedSlice(shared, index, layer) for index, layer in enumerate(layers)]


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The items of the outermost lists of modules."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else _decoder_layers(child)
    return layers


def _groups(
    unit: nn.Module, uses: Counter[int]
) -> Iterator[tuple[nn.Module, tuple[str, ...], list[nn.Linear]]]:
    for parent in unit.modules():
        children = {name: child for name, child in parent.named_children() if _is_own(child, uses)}
        for names, layers in sibling_groups(children):
            yield parent, names, layers


def _is_own(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether a module is a plain linear layer whose weight no other module has. Subclasses may compute something
    else."""
    if type(module) is not nn.Linear or module.weight.dtype not in MAX_DIFFERENCES:
        return False
    return all(uses[id(parameter)] == 1 for parameter in module.parameters())


def _move(layers: list[nn.Linear]) -> None:
    """Copies all weights of a decoder layer, which frees their memory as one piece.

    Weights are loaded in the order of their names: keys, output, queries, values. A packed matrix would fit into none
    of the gaps that its parts leave, so an allocator would keep both.
    """
    copies = [layer.weight.detach().clone() for layer in layers]
    for layer, copy in zip(layers, copies, strict=True):
        layer.weight.data = copy


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
