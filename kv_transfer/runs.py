"""Merging block pairs into runs: the fewer descriptors, the faster a transfer is posted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`length` blocks that are neighbours in both pools; `local` and `remote` are the first indices."""

    local: int
    remote: int
    length: int


def merge_runs(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> list[Run]:
    """Maximal runs, contiguous on both sides, that cover the pairs in order; one descriptor each.

    Raises ValueError when the sequences differ in length.
    """
    runs: list[Run] = []
    local_start = remote_start = length = 0
    for local, remote in zip(local_blocks, remote_blocks, strict=True):
        if length and local == local_start + length and remote == remote_start + length:
            length += 1
            continue
        if length:
            runs.append(Run(local_start, remote_start, length))
        local_start, remote_start, length = local, remote, 1
    if length:
        runs.append(Run(local_start, remote_start, length))
    return runs
