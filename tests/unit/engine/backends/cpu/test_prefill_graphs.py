"""The graph that a chunk uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.backends.cpu.graphs.prefill_graphs import MAX_GRAPHS, chunk_rows


@given(st.integers(1, 1 << 20))
def test_few_rows_are_wasted(tokens: int) -> None:
    rows = chunk_rows(tokens)
    assert 0 <= rows - tokens <= (7 if tokens <= 64 else max(15, tokens / 16))
    assert chunk_rows(rows) == rows


def test_few_graphs_are_needed() -> None:
    assert len({chunk_rows(tokens) for tokens in range(1, 513)}) == MAX_GRAPHS
    assert len({chunk_rows(tokens) for tokens in range(1, 8193)}) <= 100
    assert all(chunk_rows(1 << power) == 1 << power for power in range(3, 20))
