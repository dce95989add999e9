"""Which lengths of chunks get a tape."""

from __future__ import annotations

import random

from engine.cpu.chunk_tapes import COUNTED_STEPS, MOST_TAPES, SEEN_BEFORE, Lengths


class Taped:
    """Lengths as they come, and the tapes that are made for them."""

    def __init__(self) -> None:
        self.lengths, self.tapes, self.made = Lengths(), set[int](), 0

    def step(self, length: int) -> None:
        self.lengths.see(length)
        if length in self.tapes:
            return
        leaves = self.lengths.makes_room(length, self.tapes)
        if leaves is None:
            return
        self.tapes.discard(leaves)
        self.tapes.add(length)
        self.made += 1
        assert len(self.tapes) <= MOST_TAPES


def test_one_that_comes_again_gets_one() -> None:
    taped = Taped()
    for _ in range(SEEN_BEFORE):
        taped.step(512)
    assert not taped.tapes
    taped.step(512)
    assert taped.tapes == {512}


def test_many_lengths_as_frequent_as_each_other_do_not_drive_each_other_out() -> None:
    taped = Taped()
    for _ in range(20):
        for length in range(100, 600):
            taped.step(length)
    assert taped.made < 200, "of 10,000 steps"
    numbers = random.Random(1)
    taped = Taped()
    for _ in range(10_000):
        taped.step(numbers.randrange(100, 600))
    assert taped.made < 500


def test_frequent_ones_stay_and_new_ones_come() -> None:
    taped, numbers = Taped(), random.Random(2)
    for often in (512, 256):
        for _ in range(2 * COUNTED_STEPS):
            taped.step(often if numbers.random() < 0.5 else numbers.randrange(1000, 3000))
        assert often in taped.tapes
    made = taped.made
    for _ in range(100):
        taped.step(256)
    assert taped.made == made


def test_counts_do_not_grow_without_bound() -> None:
    taped = Taped()
    for length in range(5 * COUNTED_STEPS):
        taped.step(length)
    assert len(taped.lengths._seen) <= COUNTED_STEPS
