"""The prefix index against a plain model; after gaps, when full, and when workers leave."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.workers.prefix_index import LIFETIME_S, MAX_LEVELS, PrefixIndex, limited
from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import block_keys
from splitserve.v1 import registry_pb2
from tests.support.clients.inference_requests import hits_of

A, B = ("a", 1), ("b", 1)


def names(*keys: int) -> bytes:
    return array.array("Q", keys).tobytes()


def events(
    sequence: int, *stored: int, removed: tuple[int, ...] = (), cleared: bool = False
) -> registry_pb2.CacheEvents:
    return registry_pb2.CacheEvents(
        sequence=sequence, cleared=cleared, removed=names(*removed), stored=names(*stored)
    )


def holding(**held: tuple[int, ...]) -> PrefixIndex:
    index = PrefixIndex()
    for name, keys in held.items():
        index.apply((name, 1), events(1, *keys, cleared=True))
    return index


def blocks(index: PrefixIndex, worker: WorkerKey, *keys: int, now: float = 0.0) -> int:
    return index.hits(keys, now).blocks(index.slot_of(worker))


def test_the_longest_prefix_of_each_worker() -> None:
    index = holding(a=(1, 2, 3), b=(1,), c=(7, 8))
    assert [blocks(index, (name, 1), 1, 2, 3, 4) for name in "abc"] == [3, 1, 0]
    assert not index.hits((9,), 0.0)
    assert not index.hits((), 0.0)


def test_removed_blocks_end_the_prefix() -> None:
    index = holding(a=(1, 2, 3))
    index.apply(A, events(2, 4, removed=(2, 3)))
    assert blocks(index, A, 1, 2, 3) == 1


def test_a_gap_forgets_and_requests_a_resync_once() -> None:
    index = holding(a=(1, 2))
    index.apply(A, events(3, 5))
    assert blocks(index, A, 1) == 0
    assert index.take_resync(A)
    index.apply(A, events(4, 6))
    assert not index.take_resync(A)
    assert blocks(index, A, 6) == 0
    index.apply(A, events(5, 7, cleared=True))
    index.apply(A, events(6, 8))
    assert blocks(index, A, 7, 8) == 2
    assert blocks(index, A, 1) == 0


def test_a_stream_that_does_not_begin_at_the_start_is_resynced() -> None:
    index = PrefixIndex()
    index.apply(A, events(7, 1))
    assert index.take_resync(A)
    assert blocks(index, A, 1) == 0


def test_a_removed_worker_holds_nothing_and_its_slot_is_clean_when_reused() -> None:
    index = holding(a=(1, 2), b=(1,))
    slot = index.slot_of(A)
    index.forget(A)
    assert index.slot_of(A) == -1
    assert index.hits((1, 2), 0.0).blocks(slot) == 0
    index.sweep(10**6)
    index.apply(("c", 1), events(1, 9, cleared=True))
    assert index.slot_of(("c", 1)) == slot
    assert blocks(index, ("c", 1), 1, 2) == 0
    assert blocks(index, B, 1) == 1
    assert len(index) == 2


def test_a_full_index_keeps_what_was_used_last() -> None:
    index = PrefixIndex(max_blocks=64)
    index.apply(A, events(1, *range(64), cleared=True))
    assert blocks(index, A, 1, 2, 3) == 3
    for sequence, key in enumerate(range(1000, 1400), 2):
        index.apply(A, events(sequence, key))
        assert blocks(index, A, 1, 2, 3) == 3
        assert len(index) <= 64


def test_expected_blocks_count_until_reported_or_expired() -> None:
    index = holding(a=(), b=())
    index.expect([A], (1, 2), 100.0)
    assert blocks(index, A, 1, 2, now=101.0) == 2
    index.apply(A, events(2, 1))
    late = 100.0 + 3 * LIFETIME_S
    assert blocks(index, A, 1, 2, now=late) == 1
    assert blocks(index, B, 1, 2, now=101.0) == 0
    index.expect([("unknown", 1)], (1,), 100.0)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_hits_are_the_full_blocks_in_common(prompt: int, by_a: int, by_b: int) -> None:
    """Worker a has reported its blocks, b is expected to hold its own."""
    tokens = list(range(200))
    index, keys = holding(a=(), b=()), block_keys(tokens[:prompt], 16, b"", 99)
    index.apply(A, events(2, *block_keys(tokens[:by_a], 16, b"", 99)))
    index.expect([B], block_keys(tokens[:by_b], 16, b"", 99), 0.0)
    hits = index.hits(keys, 0.0)
    assert hits.blocks(index.slot_of(A)) == min(prompt, by_a) // 16
    assert hits.blocks(index.slot_of(B)) == min(prompt, by_b) // 16
    assert not index.hits((), 0.0)


def test_an_expectation_is_not_inherited_with_the_slot() -> None:
    index = holding(a=())
    index.expect([A], (1,), 0.0)
    index.forget(A)
    index.sweep(10**6)
    index.apply(B, events(1, cleared=True))
    assert blocks(index, B, 1) == 0


@pytest.mark.parametrize("bad", [b"1234567", bytes(8 * (2**17 + 1))])
def test_bad_names_are_refused_by_field(bad: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        PrefixIndex().apply(A, registry_pb2.CacheEvents(sequence=1, cleared=True, stored=bad))
    assert caught.value.field == "cache_events.stored"


def test_as_many_holders_as_there_are_levels_keep_their_depths() -> None:
    held = {slot: slot + 1 for slot in range(48)}
    assert [limited(list(hits_of(held).levels)).blocks(slot) for slot in held] == list(held.values())


@given(st.dictionaries(st.integers(0, 300), st.integers(1, 40), max_size=60), st.integers(1, 310))
@example(held={slot: slot + 2 for slot in range(16)} | {16: 1}, count=1)
def test_hits_by_slot_are_those_of_each_slot(held: dict[int, int], count: int) -> None:
    hits = hits_of(held)
    column = hits.by_slot(count)
    assert len(column) == count + 1
    assert column[-1] == 0
    assert column[:-1].tolist() == [held.get(slot, 0) for slot in range(count)]
    assert all(hits.blocks(slot) == held.get(slot, 0) for slot in range(310))
    shorter = limited(list(hits.levels))
    assert len(shorter.levels) <= MAX_LEVELS
    assert np.all(shorter.by_slot(count) <= column)
    # Of all slots the deepest keeps its depth; among the first `count` alone it may have been a shallow one.
    assert shorter.by_slot(301).max() == hits.by_slot(301).max()


@given(st.lists(st.integers(0, 100), max_size=5), st.integers(0, 100), st.integers(0, 90))
def test_strides_find_every_depth(depths: list[int], length: int, expected: int) -> None:
    index, prompt = PrefixIndex(), tuple(range(1000, 1000 + length))
    for number, depth in enumerate(depths):
        index.apply((f"w{number}", 1), events(1, *range(1000, 1000 + depth), cleared=True))
    index.apply(A, events(1, cleared=True))
    index.expect([A], range(1000, 1000 + expected), 0.0)
    hits = index.hits(prompt, 0.0)
    assert hits.blocks(index.slot_of(A)) == min(expected, length)
    for number, depth in enumerate(depths):
        assert hits.blocks(index.slot_of((f"w{number}", 1))) == min(depth, length)


PROMPTS = (0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 13, 14, 15)
Depths = tuple[int, int]
depths_st = st.tuples(st.integers(0, 7), st.integers(0, 6))


def blocks_of(depths: Depths) -> set[int]:
    return {block for prompt, depth in zip(PROMPTS, depths, strict=True) for block in prompt[:depth]}


class AgainstSets(RuleBasedStateMachine):
    """Three workers whose caches change, restart and lose messages."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(100_000)
        self.held: dict[WorkerKey, set[int]] = {}
        self.sequence: dict[WorkerKey, int] = {}

    @rule(worker=st.integers(0, 2), depths=depths_st)
    def change(self, worker: int, depths: Depths) -> None:
        key, wanted = (f"w{worker}", 1), blocks_of(depths)
        first = key not in self.held
        held = self.held.get(key, set())
        self.sequence[key] = self.sequence.get(key, 0) + 1
        news = events(self.sequence[key], *(wanted - held), removed=tuple(held - wanted), cleared=first)
        self.index.apply(key, news)
        self.held[key] = wanted

    @rule(worker=st.integers(0, 2), depths=depths_st)
    def tell_all(self, worker: int, depths: Depths) -> None:
        key = (f"w{worker}", 1)
        self.sequence[key] = self.sequence.get(key, 0) + 3
        self.held[key] = blocks_of(depths)
        self.index.apply(key, events(self.sequence[key], *self.held[key], cleared=True))

    @rule(worker=st.integers(0, 2))
    def go(self, worker: int) -> None:
        key = (f"w{worker}", 1)
        self.index.forget(key)
        self.held.pop(key, None)
        self.sequence.pop(key, None)

    @rule(shards=st.integers(1, 64))
    def sweep(self, shards: int) -> None:
        self.index.sweep(shards)

    @invariant()
    def same(self) -> None:
        for prompt in PROMPTS:
            hits = self.index.hits(prompt, 0.0)
            for key, held in self.held.items():
                depth = next((at for at, block in enumerate(prompt) if block not in held), len(prompt))
                assert hits.blocks(self.index.slot_of(key)) == depth


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
