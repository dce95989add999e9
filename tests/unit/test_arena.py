"""Where results of a tape lie: those that are needed at the same time never in the same place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.arena import ALIGNED, Arena, Buffer, place
from engine.cpu.decode_tapes import MOST_ROWS, tape_sizes

Program = list[list[tuple[Buffer, int]]]
"""Of each operation the results that it uses, and the distances from their beginnings."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Of some buffers, a few of which stay where they are."""
    buffers = [
        Buffer(size, fixed=draw(st.booleans()) and draw(st.booleans()))
        for size in draw(st.lists(st.integers(1, 300), min_size=1, max_size=10))
    ]
    use = st.sampled_from(buffers).flatmap(
        lambda buffer: st.tuples(st.just(buffer), st.integers(0, buffer.num_bytes - 1))
    )
    return draw(st.lists(st.lists(use, max_size=6), max_size=12))


def pointers_of(program: Program, arena: Arena) -> list[list[int]]:
    """What each operation is given, after all have been placed."""
    ops = [np.full(6, -1, np.int64) for _ in program]
    for time, (op, uses) in enumerate(zip(ops, program, strict=True)):
        for slot, (buffer, distance) in enumerate(uses):
            buffer.uses.append((time, op, slot, distance))
    place({id(buffer): buffer for uses in program for buffer, _ in uses}.values(), arena)
    return [op[: len(uses)].tolist() for op, uses in zip(ops, program, strict=True)]


@given(programs())
def test_no_two_that_live_at_once_overlap(program: Program) -> None:
    arena = Arena()
    pointers = pointers_of(program, arena)
    begin = arena.take(0)
    end = begin + sum(chunk.numel() for chunk in arena._chunks)
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


def test_a_chain_needs_room_for_two() -> None:
    arena = Arena()
    chain = [Buffer(1000) for _ in range(50)]
    pointers = pointers_of([[(one, 0), (after, 0)] for one, after in pairwise(chain)], arena)
    assert len({pointer for given_ in pointers for pointer in given_}) == 2
    assert sum(chunk.numel() for chunk in arena._chunks) == 2 * 1024 + ALIGNED


def test_what_nobody_uses_needs_no_room() -> None:
    arena = Arena()
    place([Buffer(1 << 40)], arena)
    assert sum(chunk.numel() for chunk in arena._chunks) <= 1024


def test_programs_share_an_arena() -> None:
    arena = Arena()
    address = arena.take(1000)
    assert address % ALIGNED == 0
    assert arena.take(10) == address
    larger = arena.take(100_000)
    assert arena.take(100_000) == larger
    assert arena.take(1000) == address, "what has been given out stays"
    for size in range(100_000, 110_000, 100):
        arena.take(size)
    assert len(arena._chunks) == 2, "those that are a little larger each take no memory of their own"


@given(st.integers(1, 2 * MOST_ROWS))
def test_sizes_of_tapes(most: int) -> None:
    sizes = tape_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] >= min(most, MOST_ROWS), "any batch has one, up to the largest"
    assert all(size < most for size in sizes[:-1]), "none is larger than it must be"
    assert sizes[-1] <= MOST_ROWS
    # A row of padding costs nearly as much as another: few are wasted.
    assert all(after <= max(before + 4, 1.6 * before) for before, after in pairwise(sizes))
