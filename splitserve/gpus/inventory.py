"""The GPUs of a machine that replicas may get, of which kinds they are, and which share NVLink. Pure.

A kind is words of what the driver calls a product or a MIG slice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Self

from splitserve.config.gpu_list import gpu_groups, gpu_kinds
from splitserve.errors import FailedPreconditionError

MAX_KIND = 96
"""Characters of a product's name, as NVML bounds it."""
SLICE_WORD = "mig"
"""The word in a kind of slices, as in the driver's own names: "NVIDIA H100 80GB HBM3 MIG 3g.40gb"."""
_BETWEEN = re.compile(r"[\s,/()_-]+")
_PROFILE = re.compile(r"\d+g\.\d+gb")
_MOST_SHOWN = 6
"""Kinds that an error lists at most."""


def is_slices(kind: str) -> bool:
    """Whether this is a kind of MIG slices."""
    words = _words(kind)
    return SLICE_WORD in words or any(_PROFILE.match(word) for word in words)


def is_of_kind(wanted: str, kind: str, *, is_slice: bool = False) -> bool:
    """Whether a GPU of `kind` is what is `wanted`: all its words are in the name, in any order and case.

    `H100` means an "NVIDIA H100 80GB HBM3" but no "NVIDIA H100 80GB HBM3 MIG 3g.40gb"; `L40` means no "NVIDIA L40S". A
    MIG slice is of a wanted kind only if the kind names slices. A GPU whose kind is unknown is of no kind.
    """
    if not kind or is_slices(wanted) != (is_slice or is_slices(kind)):
        return False
    return _words(wanted) - {SLICE_WORD} <= _words(kind)


def kinds_there(kinds: Iterable[str]) -> str:
    """The number of GPUs of each kind, for people."""
    counts = Counter(kind or "unnamed" for kind in kinds)
    shown = [f"{count} {kind}" for kind, count in counts.most_common(_MOST_SHOWN)]
    return ", ".join(shown) + (", ..." if len(counts) > _MOST_SHOWN else "")


def _words(text: str) -> set[str]:
    return {word for word in _BETWEEN.split(text.casefold()) if word}


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
    kinds: Mapping[str, str] = field(default_factory=dict)
    """By name, what the driver or the operator calls each: "NVIDIA L40S"."""

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[str]], replicas_per_gpu: int = 1) -> Self:
        """The inventory of groups of GPUs; the members of a group are all linked with each other."""
        links = frozenset(frozenset(pair) for group in groups for pair in combinations(group, 2))
        return cls(tuple(gpu for group in groups for gpu in group), links, {}, replicas_per_gpu)

    @classmethod
    def listed(cls, text: str, replicas_per_gpu: int = 1) -> Self:
        """The inventory of a list such as "H100=0,1;L40S=2,3". Raises InvalidArgumentError as `gpu_groups`."""
        return replace(cls.of_groups(gpu_groups(text), replicas_per_gpu), kinds=gpu_kinds(text))

    @property
    def capacity(self) -> int:
        """GPUs that replicas may take in total; a shared GPU counts once for each replica that may have it."""
        return len(self.gpus) * self.replicas_per_gpu

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """The same GPUs under this inventory's own names. Unknown names stay as they are."""
        return tuple(self.aliases.get(name, name) for name in names)

    def restricted_to(self, names: Sequence[str]) -> GpuInventory:
        """The named GPUs alone, in this order, as CUDA_VISIBLE_DEVICES restricts a process. Unknown names are
        ignored."""
        kept = tuple(name for name in dict.fromkeys(self.named(names)) if name in self.gpus)
        links = frozenset(pair for pair in self.links if pair <= set(kept))
        kinds = {name: self.kinds[name] for name in kept if name in self.kinds}
        return replace(self, gpus=kept, links=links, kinds=kinds)

    def of_kind(self, wanted: str) -> GpuInventory:
        """The GPUs of the `wanted` kind alone; all if it is empty. Raises FailedPreconditionError (GPU_KIND, field
        `gpu`) without a GPU of this kind."""
        if not wanted:
            return self
        kinds = {name: self.kinds.get(name, "") for name in self.gpus}
        kept = [name for name, kind in kinds.items() if is_of_kind(wanted, kind, is_slice=is_mig(name))]
        if kept:
            return self.restricted_to(kept)
        there = f"there are {kinds_there(kinds.values())}"
        if not any(kinds.values()):
            there = "their kinds are not known: list them as KIND=0,1, or have the driver asked (`auto`)"
        message = f"gpu: none of the {len(self.gpus)} GPUs is of the kind {wanted!r}; {there}"
        raise FailedPreconditionError(message, reason="GPU_KIND", field="gpu")
