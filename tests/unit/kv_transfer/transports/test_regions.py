"""Rows of registered memory, and merging of block pairs into runs."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports.regions import KvMemoryRegion, Run, merge_runs
from tests.support.engine.numpy_pool import LAYOUT

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


@given(PAIRS)
def test_runs_cover_the_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    runs = merge_runs([a for a, _ in pairs], [b for _, b in pairs])
    assert [(r.local + i, r.remote + i) for r in runs for i in range(r.length)] == pairs


@given(PAIRS)
def test_runs_are_maximal(pairs: list[tuple[int, int]]) -> None:
    runs = merge_runs([a for a, _ in pairs], [b for _, b in pairs])
    for left, right in itertools.pairwise(runs):
        assert (left.local + left.length, left.remote + left.length) != (right.local, right.remote)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 500))
def test_neighbours_on_both_sides_are_one_run(local: int, remote: int, length: int) -> None:
    runs = merge_runs(range(local, local + length), range(remote, remote + length))
    assert runs == [Run(local, remote, length)]


def test_empty_and_unequal() -> None:
    assert merge_runs([], []) == []
    with pytest.raises(ValueError, match="shorter"):
        merge_runs([1, 2], [1])


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_rows_of_all_shares_of_heads_cover_the_memory_once(layered: bool, count: int) -> None:
    """Whole, and layer by layer for each share of the heads, as tensor-parallel ranks have them."""
    heads, blocks = 4, 3
    layout = replace(LAYOUT, num_kv_heads=heads)
    stride = blocks * layout.block_bytes // layout.num_layers if layered else 0
    region = KvMemoryRegion(4096, blocks, layout, layer_stride=stride)
    parts = [region.heads(first, count) for first in range(0, heads, count)] if layered else [region]
    seen: Counter[int] = Counter()
    for part in parts:
        for row in part.rows:
            for start in (row + block * part.stride for block in range(part.num_blocks)):
                seen.update(range(start, start + part.piece_bytes))
    assert seen == Counter(range(4096, 4096 + blocks * layout.block_bytes))
