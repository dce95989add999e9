"""The memory of a graph's results: those that are live at the same time never overlap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.cpu.graphs.capture import ALIGNED, Buffer, MemoryPlanner, assign_memory

Program = list[list[tuple[Buffer, int]]]
"""For each operation the buffers that it uses, and the offsets in them."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs over some buffers, a few of which are fixed."""
    buffers = [
        Buffer(size, fixed=draw(st.booleans()) and draw(st.booleans()))
        for size in draw(st.lists(st.integers(1, 300), min_size=1, max_size=10))
    ]
    use = st.sampled_from(buffers).flatmap(
        lambda buffer: st.tuples(st.just(buffer), st.integers(0, buffer.num_bytes - 1))
    )
    return draw(st.lists(st.lists(use, max_size=6), max_size=12))


def pointers_of(program: Program, planner: MemoryPlanner) -> list[list[int]]:
    """Each operation's pointers, after all buffers have been placed."""
    ops = [np.full(6, -1, np.int64) for _ in program]
    for time, (op, uses) in enumerate(zip(ops, program, strict=True)):
        for slot, (buffer, distance) in enumerate(uses):
            buffer.uses.append((time, op, slot, distance))
    assign_memory({id(buffer): buffer for uses in program for buffer, _ in uses}.values(), planner)
    return [op[: len(uses)].tolist() for op, uses in zip(ops, program, strict=True)]


@given(programs())
def test_no_two_that_live_at_once_overlap(program: Program) -> None:
    planner = MemoryPlanner()
    pointers = pointers_of(program, planner)
    begin = planner.take(0)
    end = begin + sum(chunk.numel() for chunk in planner._chunks)
    bases: dict[int, set[int]] = {}
    buffers: dict[int, Buffer] = {}
    for given_, uses in zip(pointers, program, strict=True):
        for pointer, (buffer, distance) in zip(given_, uses, strict=True):
            buffers[id(buffer)] = buffer
            bases.setdefault(id(buffer), set()).add(-1 if buffer.fixed else pointer - distance)
            assert not buffer.fixed or pointer == -1, "it is not touched"
    places = []
    for key, buffer in buffers.items():
        (base,) = bases[key]  # one place for all of its life
        if buffer.fixed:
            continue
        assert base % ALIGNED == 0
        assert begin <= base
        assert base + buffer.num_bytes <= end
        places.append((base, base + buffer.num_bytes, buffer.uses[0][0], buffer.uses[-1][0]))
    for number, (low, high, first, last) in enumerate(places):
        for other_low, other_high, other_first, other_last in places[:number]:
            assert high <= other_low or other_high <= low or last < other_first or other_last < first


def test_a_chain_needs_memory_for_two() -> None:
    planner = MemoryPlanner()
    chain = [Buffer(1000) for _ in range(50)]
    pointers = pointers_of([[(one, 0), (after, 0)] for one, after in pairwise(chain)], planner)
    assert len({pointer for given_ in pointers for pointer in given_}) == 2
    assert sum(chunk.numel() for chunk in planner._chunks) == 2 * 1024 + ALIGNED


def test_unused_buffers_need_no_memory() -> None:
    planner = MemoryPlanner()
    assign_memory([Buffer(1 << 40)], planner)
    assert sum(chunk.numel() for chunk in planner._chunks) <= 1024


def test_programs_share_memory() -> None:
    planner = MemoryPlanner()
    address = planner.take(1000)
    assert address % ALIGNED == 0
    assert planner.take(10) == address
    larger = planner.take(100_000)
    assert planner.take(100_000) == larger
    assert planner.take(1000) == address, "an address stays valid"
    for size in range(100_000, 110_000, 100):
        planner.take(size)
    assert len(planner._chunks) == 2, "slightly larger ones each do not take new memory"
