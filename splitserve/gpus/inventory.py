"""The GPUs of a machine that replicas may get, and which of them share NVLink. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Self

MIG_PREFIX = "MIG-"


def is_mig(name: str) -> bool:
    """Whether the name is that of a MIG slice."""
    return name.startswith(MIG_PREFIX)


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs and MIG slices that replicas may get, in the order in which they are given out."""

    gpus: tuple[str, ...] = ()
    links: frozenset[frozenset[str]] = frozenset()
    """Pairs that are connected by NVLink, through switches too."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of GPUs: by UUID, the name in `gpus`."""
    replicas_per_gpu: int = 1
    """How many replicas may share one GPU. Above 1 only where that was asked for, as with MPS."""

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[str]], replicas_per_gpu: int = 1) -> Self:
        """Of groups whose members are all linked with each other."""
        links = frozenset(frozenset(pair) for group in groups for pair in combinations(group, 2))
        return cls(tuple(gpu for group in groups for gpu in group), links, {}, replicas_per_gpu)

    @property
    def capacity(self) -> int:
        """GPUs that replicas may take in all, one that is shared counted once for each replica."""
        return len(self.gpus) * self.replicas_per_gpu

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """The same GPUs under this inventory's own names. Unknown ones stay as they are."""
        return tuple(self.aliases.get(name, name) for name in names)

    def restricted_to(self, names: Sequence[str]) -> GpuInventory:
        """The named ones alone, in this order, as CUDA_VISIBLE_DEVICES restricts a process. Others are left out."""
        kept = tuple(name for name in dict.fromkeys(self.named(names)) if name in self.gpus)
        links = frozenset(pair for pair in self.links if pair <= set(kept))
        return replace(self, gpus=kept, links=links)
