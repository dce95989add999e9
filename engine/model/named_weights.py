"""The weights of a model by their names, as they were loaded, also where the engine has packed them since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kv_transfer.weights.manifest import ELEMENT_BYTES, PLAIN, TensorSpec, WeightsForm, WeightsReader
from splitserve.errors import UnavailableError

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ELEMENT_BYTES}


ALL_ROWS = slice(None)
SCALES = "weight_scale"
"""Beside a quantized "weight": one float32 for each output."""


class PackedModule(nn.Module):
    """A module that has put its parameters into another form."""

    def unpacked(self, name: str, rows: slice = ALL_ROWS) -> torch.Tensor | None:
        """These rows of a parameter as it was, "weight" or "bias", or of quantized weights and their SCALES; None if
        there is none, or no way back."""
        return None


def tensor_specs(module: Any, int8: Collection[str] = ()) -> tuple[TensorSpec, ...]:
    """All tensors of a model but those that repeat others, such as tied output embeddings; also on the meta device.
    None of them where one has an element type that is not sent. `int8`: names of the layers whose weights are sent as
    int8 values and scales, whatever they are here."""
    tensors: Mapping[str, torch.Tensor] = module.state_dict()
    tied: Mapping[str, str] = module.all_tied_weights_keys
    if any(tensor.dtype not in _NAMES for name, tensor in tensors.items() if name not in tied):
        return ()
    weights, scales = {f"{name}.weight" for name in int8}, [f"{name}.{SCALES}" for name in int8]
    if weights & (tied.keys() | set(tied.values())) or tensors.keys() & set(scales):
        return ()
    plain = [
        TensorSpec(name, tuple(tensor.shape), "int8" if name in weights else _NAMES[tensor.dtype])
        for name, tensor in tensors.items()
        if name not in tied
    ]
    return (
        *plain,
        *(TensorSpec(f"{name}.{SCALES}", tensors[f"{name}.weight"].shape[:1], "float32") for name in int8),
    )


def empty_tensor(spec: TensorSpec) -> torch.Tensor:
    """Memory of the host for a tensor, with any content."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as a flat view of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class NamedWeights(WeightsReader):
    """Reads them for a worker that starts. Raises UnavailableError (NO_WEIGHTS) for one that is there no more."""

    def __init__(
        self,
        module: Any,
        specs: Sequence[TensorSpec],
        fingerprint: str,
        form: WeightsForm = PLAIN,
        content: str = "",
    ) -> None:
        self._module: Any = module
        self.specs, self.fingerprint, self.form, self.content = specs, fingerprint, form, content
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, spec: TensorSpec, start: int, count: int) -> memoryview:
        """See `WeightsReader`."""
        last = self._last
        if last is None or last[0] != spec.name:
            last = self._last = None
            last = self._last = spec.name, as_bytes(self._tensor(spec).contiguous())
        # From a device only this piece is copied.
        piece = last[1][start : start + count].cpu()
        view: memoryview = piece.numpy().data
        return view

    def rest(self) -> None:
        """See `WeightsReader`."""
        self._last = None

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        path, _, name = spec.name.rpartition(".")
        parent = self._module.get_submodule(path)
        own = {**dict(parent.named_parameters(recurse=False)), **dict(parent.named_buffers(recurse=False))}
        found = own.get(name)
        if found is None and isinstance(parent, PackedModule):
            found = parent.unpacked(name)
        if found is None or tuple(found.shape) != spec.shape or _NAMES.get(found.dtype) != spec.dtype:
            message = f"the engine keeps {spec.name!r} in a form that cannot be given"
            raise UnavailableError(message, reason="NO_WEIGHTS")
        return found.detach()
