"""Merging of block pairs into runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports.regions import Run, merge_runs

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
