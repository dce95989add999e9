"""The names that requests may use as models: base models, and the adapters that workers have for them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.generation.kv_blocks import Adapter


class ModelCatalog:
    """What has had a worker since the start. Names stay known when their workers are gone."""

    def __init__(self) -> None:
        self.models: Mapping[str, Model] = {}
        """By name, adapters included. Replaced when it changes."""
        self._bases: dict[str, Model] = {}
        self._adapters: dict[str, tuple[str, Adapter]] = {}
        """By adapter: the name of its base model, and the content that was registered last."""
        self._changed = False

    def add(self, worker: Worker) -> None:
        """Learns a worker's adapters; the next `update` shows them."""
        for name, adapter in worker.adapters.items():
            if self._adapters.get(name) != (worker.model.name, adapter):
                self._adapters[name] = worker.model.name, adapter
                self._changed = True

    def know(self, models: Iterable[Model]) -> None:
        """Learns base models that no worker has registered here; the next `update` shows them."""
        for model in models:
            if model.name not in self._bases and model.name not in self._adapters:
                self._bases[model.name] = model
                self._changed = True

    def update(self, snapshot: PoolSnapshot) -> None:
        """Learns the base models of all workers."""
        bases = {**self._bases, **snapshot.models()}
        if bases == self._bases and not self._changed:
            return
        self._bases, self._changed = bases, False
        adapters = {
            name: dataclasses.replace(bases[base], name=name, adapter=adapter, base=base)
            for name, (base, adapter) in self._adapters.items()
        }
        self.models = {**adapters, **bases}
