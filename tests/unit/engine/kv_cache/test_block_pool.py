"""The block pool: two owners, no double free, contiguous allocation, LRU eviction."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool, FreeBlocks


def runs(blocks: list[int]) -> int:
    return sum(1 for index, block in enumerate(blocks) if index == 0 or blocks[index - 1] + 1 != block)


def test_a_new_pool_allocates_one_run() -> None:
    pool = BlockPool(100)
    assert runs(pool.allocate(40)) == 1
    assert runs(pool.allocate(60)) == 1
    assert pool.free == 0


def test_freed_neighbours_merge_and_growth_follows_the_last_block() -> None:
    pool = BlockPool(64)
    parts = [pool.allocate(8) for _ in range(8)]
    for index in (2, 4, 3):
        pool.release(parts[index])
    assert pool.allocate(24) == list(range(16, 40))
    pool.release(parts[6])
    assert pool.allocate(1, after=parts[5][-1]) == [parts[6][0]]


def test_misuse_is_an_error() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="writer"):
        pool.release_writer(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="not cached"):
        pool.share(blocks[:1])
    with pytest.raises(AssertionError, match="owner"):
        pool.cache(blocks[0], b"x")


def test_a_block_is_free_only_without_request_and_writer() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3, writer=True)
    assert pool.counts().reserved == 3
    pool.release(blocks)
    assert (pool.counts().quarantined, pool.free) == (3, 5)
    pool.release_writer(blocks)
    assert (pool.counts().quarantined, pool.free) == (0, 8)


def test_cached_blocks_are_evicted_least_recently_used_first_and_from_the_end() -> None:
    pool = BlockPool(4)
    old, young = pool.allocate(2), pool.allocate(2)
    for name, block in zip((b"o0", b"o1", b"y0", b"y1"), old + young, strict=True):
        pool.cache(block, name)
    pool.release(old)
    pool.release(young)
    assert pool.free == 4
    pool.share([old[0], old[1]])
    pool.release(old)
    pool.allocate(1)
    assert [pool.lookup(name) is not None for name in (b"o0", b"o1", b"y0", b"y1")] == [
        True,
        True,
        True,
        False,
    ]


def test_a_shared_block_survives_until_its_last_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, b"p")
    pool.share([block])
    pool.release([block])
    assert pool.counts().referenced == 1
    pool.release([block])
    assert pool.lookup(b"p") == block
    pool.allocate(2)
    assert pool.lookup(b"p") is None


def test_a_second_block_of_the_same_prefix_is_not_cached() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"p")
    pool.cache(second, b"p")
    pool.release([first, second])
    assert pool.lookup(b"p") == first
    assert pool.free == 2


def test_a_million_blocks() -> None:
    began = time.thread_time()
    pool = BlockPool(1_000_000)
    held = [pool.allocate(100) for _ in range(200)]
    for blocks in held[::2]:
        pool.release(blocks)
    for _ in range(10_000):
        pool.release(pool.allocate(1))
    assert time.thread_time() - began < 3


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_free_runs_against_a_set(steps: list[tuple[bool, int]]) -> None:
    free, model, held = FreeBlocks(40), set(range(40)), list[int]()
    for take, count in steps:
        if take and count <= len(model):
            got = free.take(count)
            assert set(got) <= model
            assert len(set(got)) == count
            model -= set(got)
            held += got
        elif held:
            number = held.pop(count % len(held))
            free.add(number)
            model.add(number)
        assert len(free) == len(model)
    longest = free.take(len(model))
    assert sorted(longest) == sorted(model)
    assert runs(longest) == runs(sorted(model))


class PoolMachine(RuleBasedStateMachine):
    """Random owners against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.requests: list[list[int]] = []
        self.writers: list[list[int]] = []

    @rule(count=st.integers(1, 5), writer=st.booleans())
    def allocate(self, count: int, writer: bool) -> None:
        if count > self.pool.free:
            return
        blocks = self.pool.allocate(count, writer=writer)
        owned = {block for group in self.requests + self.writers for block in group}
        assert not owned & set(blocks)
        self.requests.append(blocks)
        if writer:
            self.writers.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cache_and_share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.requests))
        name = b"%d" % blocks[0]
        hit = self.pool.lookup(name)
        if hit is None:
            self.pool.cache(blocks[0], name)
            hit = self.pool.lookup(name)
        if hit is not None:
            self.pool.share([hit])
            self.requests.append([hit])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def release_writer(self, data: st.DataObject) -> None:
        self.pool.release_writer(self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1))))

    @invariant()
    def counts_match(self) -> None:
        requested = {block for group in self.requests for block in group}
        written = {block for group in self.writers for block in group}
        counts = self.pool.counts()
        assert counts.referenced == len(requested - written)
        assert counts.reserved == len(requested & written)
        assert counts.quarantined == len(written - requested)
        assert counts.free == 12 - len(requested | written)


TestPoolMachine = PoolMachine.TestCase
