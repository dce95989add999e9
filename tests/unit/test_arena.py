"""Where results of a tape lie: those that are needed at the same time never in the same place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.arena import ALIGNED, Arena, Buffer, place
from engine.cpu.decode_tapes import MOST_ROWS, tape_sizes
from engine.cpu.program import OP

OUTSIDE = 1 << 40


def op(*pointers: int) -> np.ndarray:
    made = np.zeros(1, OP)
    made["pointer"][0, : len(pointers)] = pointers
    return made


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Buffer], list[list[tuple[int, int]]]]:
    """Buffers, some of nothing and some that stay, and for each operation its (buffer, offset) pairs."""
    address, buffers = 1 << 20, []
    for size in draw(st.lists(st.integers(0, 300), max_size=10)):
        buffers.append(Buffer(address, size, fixed=draw(st.booleans()) and draw(st.booleans())))
        address += size + draw(st.integers(0, 8))
    used = [index for index, buffer in enumerate(buffers) if buffer.num_bytes]
    if not used:
        return buffers, []
    use = st.sampled_from(used).flatmap(
        lambda index: st.tuples(st.just(index), st.integers(0, buffers[index].num_bytes - 1))
    )
    return buffers, draw(st.lists(st.lists(use, max_size=6), max_size=12))


@given(programs(), st.integers(0, 20))
def test_no_two_that_live_at_once_overlap(
    program: tuple[list[Buffer], list[list[tuple[int, int]]]], calls: int
) -> None:
    buffers, steps = program
    notes: list[object] = [op(*(buffers[index].address + at for index, at in step)) for step in steps]
    notes.insert(calls % (len(notes) + 1), lambda: None)
    bases: dict[int, set[int]] = {}
    lives: dict[int, list[int]] = {}
    arena = Arena()
    place(notes, buffers, arena)
    ops = [note for note in notes if isinstance(note, np.ndarray)]
    for time, (note, step) in enumerate(zip(ops, steps, strict=True)):
        for slot, (index, at) in enumerate(step):
            bases.setdefault(index, set()).add(int(note["pointer"][0, slot]) - at)
            lives.setdefault(index, []).append(time)
        assert not note["pointer"][0, len(step) :].any(), "null stays null"
    begin = arena.take(0)
    end = begin + sum(chunk.numel() for chunk in arena._chunks)
    places = []
    for index, found in bases.items():
        (base,) = found  # one place for all of its life
        buffer = buffers[index]
        if buffer.fixed:
            assert base == buffer.address
            continue
        assert base % ALIGNED == 0
        assert begin <= base
        assert base + buffer.num_bytes <= end
        places.append((base, base + buffer.num_bytes, min(lives[index]), max(lives[index])))
    for number, (low, high, first, last) in enumerate(places):
        for other_low, other_high, other_first, other_last in places[:number]:
            assert high <= other_low or other_high <= low or last < other_first or other_last < first


def test_a_chain_needs_room_for_two() -> None:
    buffers = [Buffer((1 << 20) + 1000 * index, 1000) for index in range(50)]
    notes = [op(buffer.address, after.address) for buffer, after in pairwise(buffers)]
    arena = Arena()
    place(notes, buffers, arena)
    assert len({int(pointer) for note in notes for pointer in note["pointer"][0, :2]}) == 2
    assert sum(chunk.numel() for chunk in arena._chunks) == 2 * 1024 + ALIGNED


def test_what_is_not_a_result_stays() -> None:
    buffer = Buffer(1 << 20, 128)
    note = op(OUTSIDE, buffer.address - 1, buffer.address + 128, buffer.address + 127, 0)
    place([note], [buffer, Buffer(0, 0)], Arena())
    moved = note["pointer"][0].tolist()
    assert moved[:3] == [OUTSIDE, buffer.address - 1, buffer.address + 128]
    assert moved[3] % ALIGNED == 127 % ALIGNED
    assert moved[4:] == [0, 0]


def test_programs_share_an_arena() -> None:
    arena = Arena()
    address = arena.take(1000)
    assert address % ALIGNED == 0
    assert arena.take(10) == address
    larger = arena.take(100_000)
    assert arena.take(100_000) == larger
    assert arena.take(1000) == address, "what has been given out stays"


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
