"""The names that requests may use as models: base models, and the adapters that workers have for them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from splitserve.generation.kv_blocks import Adapter


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its workers serve it; see `ServedModel` in the protos."""

    name: str
    tokenizer_source: str
    context_tokens: int
    vocabulary_size: int
    block_sizes: tuple[int, ...] = ()
    """Tokens per KV block of its workers, each size once, the smallest first; empty: unknown."""
    adapter: Adapter | None = None
    """The adapter that this name stands for; None: a base model."""
    base: str = ""
    """Name of an adapter's base model."""

    @property
    def block_size_tokens(self) -> int:
        """The smallest of its block sizes; 0: unknown."""
        return self.block_sizes[0] if self.block_sizes else 0

    @property
    def base_name(self) -> str:
        """The model whose workers serve it: an adapter's base model, else the model itself."""
        return self.base or self.name


class ModelCatalog:
    """What has had a worker since the start. Names stay known when their workers are gone."""

    def __init__(self) -> None:
        self.models: Mapping[str, Model] = {}
        """By name, adapters included. Replaced when it changes."""
        self._bases: dict[str, Model] = {}
        self._adapters: dict[str, tuple[str, Adapter]] = {}
        """By adapter: the name of its base model, and the content that was registered last."""
        self._changed = False

    def add(self, base: str, adapters: Mapping[str, Adapter]) -> None:
        """Learns a worker's adapters of the model `base`; the next `update` shows them."""
        for name, adapter in adapters.items():
            if self._adapters.get(name) != (base, adapter):
                self._adapters[name] = base, adapter
                self._changed = True

    def know(self, model: Model, adapters: Mapping[str, Adapter]) -> None:
        """Learns a base model and adapters that no worker has registered here; the next `update` shows them. One that
        is known keeps its meaning."""
        if model.name not in self._bases and model.name not in self._adapters:
            self._bases[model.name] = model
            self._changed = True
        if model.name in self._bases:
            known = self._bases.keys() | self._adapters.keys()
            self.add(model.name, {name: one for name, one in adapters.items() if name not in known})

    def update(self, models: Mapping[str, Model]) -> None:
        """Learns the base models of all workers."""
        bases = {**self._bases, **models}
        if bases == self._bases and not self._changed:
            return
        self._bases, self._changed = bases, False
        adapters = {
            name: dataclasses.replace(bases[base], name=name, adapter=adapter, base=base)
            for name, (base, adapter) in self._adapters.items()
        }
        self.models = {**adapters, **bases}
