"""Kinds of GPUs: what the driver calls a product or a MIG slice, and how a class of replicas names one. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MAX_KIND = 96
"""Characters of a product's name, as NVML bounds it."""
SLICE_WORD = "mig"
"""A kind of slices has this word, as the driver's own names for them: "NVIDIA H100 80GB HBM3 MIG 3g.40gb"."""
_BETWEEN = re.compile(r"[\s,/()_-]+")
_PROFILE = re.compile(r"\d+g\.\d+gb")
_MOST_TOLD = 6


def is_slices(kind: str) -> bool:
    """Whether this is a kind of MIG slices."""
    words = _words(kind)
    return SLICE_WORD in words or any(_PROFILE.match(word) for word in words)


def is_of_kind(wanted: str, kind: str, *, is_slice: bool = False) -> bool:
    """Whether a GPU of `kind` is what is `wanted`: all its words are in the name, in any order and case.

    `H100` is an "NVIDIA H100 80GB HBM3" and no "NVIDIA H100 80GB HBM3 MIG 3g.40gb"; `L40` is no "NVIDIA L40S". A slice
    is only what names one. A GPU of which no kind is known is of none.
    """
    if not kind or is_slices(wanted) != (is_slice or is_slices(kind)):
        return False
    return _words(wanted) - {SLICE_WORD} <= _words(kind)


def kinds_there(kinds: Iterable[str]) -> str:
    """How many there are of each kind, for people."""
    counts = Counter(kind or "unnamed" for kind in kinds)
    told = [f"{count} {kind}" for kind, count in counts.most_common(_MOST_TOLD)]
    return ", ".join(told) + (", ..." if len(counts) > _MOST_TOLD else "")


def _words(text: str) -> set[str]:
    return {word for word in _BETWEEN.split(text.casefold()) if word}
