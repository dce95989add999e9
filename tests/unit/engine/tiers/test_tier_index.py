"""Which blocks a tier keeps: those of use, and of them the ones that are worth most."""

from __future__ import annotations

import random

import pytest

from engine.tiers.tier_index import Eviction, TierBlock, TierIndex
from tests.support.tiers.tiers_rig import chain, hashes_of


def put(index: TierIndex, *blocks: TierBlock, cost: float = 1.0) -> list[bytes]:
    """Adds blocks; returns what was evicted for them."""
    evicted = []
    for block in blocks:
        placed = index.add(block, cost)
        assert placed is not None
        index.ready(block.block_hash)
        if placed.evicted is not None:
            evicted.append(placed.evicted)
    return evicted


def test_a_block_is_here_once_it_has_been_written() -> None:
    index, (block,) = TierIndex(2), chain(1)
    placed = index.add(block)
    assert placed is not None
    assert index.knows(block.block_hash)
    assert block.block_hash not in index
    assert index.add(block) is None
    index.ready(block.block_hash)
    assert index.slot_of(block.block_hash) == placed.slot


def test_a_block_without_its_parent_is_not_taken() -> None:
    index, (first, second) = TierIndex(4), chain(2)
    assert index.add(second) is None
    put(index, first, second)
    assert len(index) == 2


def test_children_go_before_their_parents() -> None:
    index, long = TierIndex(4), chain(4)
    put(index, *long)
    evicted = put(index, *chain(3, name=1))
    assert evicted == hashes_of(reversed(long[1:]))


def test_a_parent_stays_while_its_child_comes() -> None:
    index, long = TierIndex(2), chain(3)
    put(index, *long[:2])
    assert index.add(long[2]) is None
    assert len(index) == 2


def test_what_is_on_its_way_is_not_evicted() -> None:
    index, (first,), (second,) = TierIndex(1), chain(1), chain(1, name=1)
    assert index.add(first) is not None
    assert index.add(second) is None
    index.ready(first.block_hash)
    assert put(index, second) == [first.block_hash]


@pytest.mark.parametrize("eviction", ["history", "age"])
def test_the_one_not_used_goes_first(eviction: Eviction) -> None:
    index, (first,), (second,) = TierIndex(2, eviction), chain(1), chain(1, name=1)
    put(index, first, second)
    index.touch([first.block_hash])
    assert put(index, *chain(1, name=2)) == [second.block_hash]


def test_a_scan_does_not_drive_out_what_is_used_again_and_again() -> None:
    kept = {}
    for eviction in ("history", "age"):
        index, hot = TierIndex(8, eviction), chain(4)  # type: ignore[arg-type]
        put(index, *hot)
        for _ in range(4):
            index.touch(hashes_of(hot))
        for name in range(1, 9):
            put(index, *chain(1, name=name))
        kept[eviction] = sum(each in index for each in hashes_of(hot))
    assert kept == {"history": 4, "age": 0}


def test_what_was_hot_once_goes_in_the_end() -> None:
    index, (hot,) = TierIndex(2), chain(1)
    put(index, hot)
    for _ in range(1000):
        index.touch([hot.block_hash])
    for name in range(1, 40):
        put(index, *chain(1, name=name))
    assert hot.block_hash not in index


def test_of_blocks_that_were_used_as_often_the_dearer_one_stays() -> None:
    index, (cheap,), (dear,) = TierIndex(2), chain(1), chain(1, name=1)
    put(index, dear, cost=3.0)
    put(index, cheap)
    index.touch([dear.block_hash, cheap.block_hash])
    assert put(index, *chain(1, name=2)) == [cheap.block_hash]


def test_a_block_that_comes_again_after_it_was_evicted_stays_longer() -> None:
    index, (again,) = TierIndex(4), chain(1)
    put(index, again, *(chain(1, name=name)[0] for name in range(1, 6)))
    assert again.block_hash not in index
    put(index, again)
    put(index, *(chain(1, name=name)[0] for name in range(6, 10)))
    assert again.block_hash in index
    put(index, *(chain(1, name=name)[0] for name in range(10, 20)))
    assert again.block_hash not in index


def test_what_is_remembered_of_evicted_blocks_is_bounded() -> None:
    index = TierIndex(4)
    put(index, *(chain(1, name=name)[0] for name in range(200)))
    assert len(index._evicted) == 16


def test_a_dropped_block_frees_its_slot() -> None:
    index, (first, second) = TierIndex(2), chain(2)
    put(index, first, second)
    index.drop(second.block_hash)
    index.drop(second.block_hash)
    assert put(index, *chain(1, name=1)) == []


def test_only_whole_prefixes_are_restored() -> None:
    first, second, third = chain(3)
    (lone,) = chain(3, name=1)[2:]
    wrong = TierBlock(chain(2, name=2)[1].block_hash, first.block_hash, 5)
    index = TierIndex(4)
    found = [(3, third), (1, second), (0, first), (2, lone), (9, first), (2, wrong)]
    index.restore(found)
    assert list(index.hashes()) == hashes_of((first, second, third))
    assert [index.slot_of(each) for each in hashes_of((first, second, third))] == [0, 1, 3]
    placed = index.add(chain(1, name=3)[0])
    assert placed is not None
    assert placed.slot == 2


@pytest.mark.parametrize("eviction", ["history", "age"])
def test_books_stay_right_whatever_happens(eviction: Eviction) -> None:
    """Slots are never shared, and every block that is here has its parents here, unless one was dropped."""
    dice = random.Random(7)
    index, chains = TierIndex(12, eviction), [chain(6, name=name) for name in range(6)]
    dropped = False
    for _ in range(4000):
        blocks = dice.choice(chains)
        block = blocks[dice.randrange(6)]
        action = dice.random()
        if action < 0.6:
            if index.add(block, dice.choice((1.0, 2.0))) is not None and dice.random() < 0.9:
                index.ready(block.block_hash)
        elif action < 0.9:
            index.touch(hashes_of(blocks[: block.depth + 1]))
        elif action < 0.91:
            index.drop(block.block_hash)
            dropped = True
        else:
            index.ready(block.block_hash)
        held = [each for blocks in chains for each in blocks if index.knows(each.block_hash)]
        slots = [slot for each in held if (slot := index.slot_of(each.block_hash)) is not None]
        assert len(slots) == len(set(slots))
        assert len(held) == len(index) <= 12
        if not dropped:
            assert all(each.parent is None or index.knows(each.parent) for each in held)
