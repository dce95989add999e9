"""The prefix index against a plain model; after gaps, when full, and when workers leave."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.workers.prefix_index.expected_blocks import LIFETIME_S
from coordinator.workers.prefix_index.hits import MAX_LEVELS, PrefixHits, limited
from coordinator.workers.prefix_index.index import PrefixIndex
from coordinator.workers.snapshot import WorkerKey
from engine.kv_cache.cache_events import KvEventLog, KvEventReader
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import NAMES_A_MESSAGE, block_hash, block_keys
from splitserve.v1 import registry_pb2

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


def tiered(sequence: int, **changed: tuple[int, ...]) -> registry_pb2.CacheEvents:
    """A message of a worker with tiers; the first one clears."""
    places = {name: names(*keys) for name, keys in changed.items()}
    return registry_pb2.CacheEvents(sequence=sequence, cleared=sequence == 1, tiered=True, **places)


def depths(index: PrefixIndex, *keys: int) -> list[int]:
    """Blocks that worker A holds anywhere, in host memory or nearer, and in its pool."""
    found = index.hits(keys, 0.0)
    return [found.blocks(slot) for slot in index.slots_of(A)]


def test_what_one_of_those_holds_who_share_a_store_all_can_read() -> None:
    index, prompt = holding(c=(1,)), (1, 2, 3, 4, 5, 6)
    index.apply(A, tiered(1, stored=(1, 2), in_host=(3,), on_disk=(4, 5)))
    index.apply(B, tiered(1, stored=(1,)))
    index.share(A, 7)
    assert blocks(index, B, *prompt) == 1, "it alone"
    index.share(B, 7)
    index.share(("unknown", 1), 7)
    found = index.hits(prompt, 0.0)
    assert [found.blocks(slot) for slot in index.slots_of(B)] == [5, 1, 1]
    assert depths(index, *prompt) == [5, 3, 2]
    assert blocks(index, ("c", 1), *prompt) == 1
    assert index.hits(prompt, 0.0, confirmed_only=True) == found
    index.apply(B, tiered(2, on_disk=(2, 3, 4, 5, 6)))
    assert depths(index, *prompt) == [6, 3, 2]
    assert not index.hits((9,), 0.0)
    index.expect([A], (9, 10), 0.0)
    assert [blocks(index, each, 9, 10) for each in (A, B)] == [2, 0], "its blocks are not there yet"
    for other in (8, 0):
        index.share(B, other)
        assert [blocks(index, each, *prompt) for each in (A, B)] == [5, 6]
    index.share(B, 7)
    index.forget(B)
    assert blocks(index, A, *prompt) == 5
    index.apply(B, tiered(1))
    assert blocks(index, B, *prompt) == 0, "another boot says anew what it shares"
    index.share(B, 7)
    assert blocks(index, B, *prompt) == 5
    index.apply(A, registry_pb2.CacheEvents(sequence=2, cleared=True, tiered=True, stored=names(1)))
    assert [blocks(index, each, *prompt) for each in (A, B)] == [1, 1]


def test_where_a_worker_with_tiers_holds_a_prefix() -> None:
    index, prompt = holding(b=(1, 2)), (1, 2, 3, 4, 5, 6)
    assert index.slots_of(A) == (-1, -1, -1)
    assert len(set(index.slots_of(B))) == 1
    index.apply(A, tiered(1, stored=(1, 2), in_host=(3,), on_disk=(4, 5)))
    assert depths(index, *prompt) == [5, 3, 2]
    index.apply(A, tiered(2, stored=(3, 4)))
    assert depths(index, *prompt) == [5, 4, 4]
    index.apply(A, tiered(3, removed=(5,), in_host=(3, 4)))
    assert depths(index, *prompt) == [4, 4, 2]
    index.apply(A, tiered(4, on_disk=(4,)))
    assert depths(index, *prompt) == [4, 3, 2]
    assert blocks(index, B, *prompt) == 2
    index.expect([A], (1, 2, 3, 4, 5, 6), 0.0)
    assert depths(index, *prompt) == [6, 6, 6], "what it is sent will be in its pool"
    index.forget(A)
    index.sweep(4096)
    assert depths(index, *prompt) == [0, 0, 0]
    assert blocks(index, B, *prompt) == 2


def test_a_worker_that_comes_back_without_tiers_has_one_slot() -> None:
    index = PrefixIndex()
    index.apply(A, tiered(1, stored=(1,), on_disk=(2,)))
    index.apply(A, events(2, 1, 2, 3, cleared=True))
    assert depths(index, 1, 2, 3) == [3, 3, 3]


@pytest.mark.parametrize("field", ["in_host", "on_disk"])
def test_names_of_tiers_are_checked(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"cache_events.{field}"):
        PrefixIndex().apply(A, registry_pb2.CacheEvents(sequence=1, tiered=True, **{field: b"short"}))  # type: ignore[arg-type]


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


def test_a_worker_that_is_asked_for_its_cache_is_a_gap_until_it_has_resent_it() -> None:
    index = holding(a=(1, 2), b=(1,))
    assert not index.gaps.any
    index.apply(A, events(3, 3))
    assert index.gaps.any, "a message was missed"
    index.apply(A, events(4, 4))
    assert index.gaps.any
    index.apply(A, events(5, 1, cleared=True))
    assert not index.gaps.any
    index.apply(A, events(7, 3))
    index.forget(A)
    assert not index.gaps.any


def test_a_large_cache_is_a_gap_until_all_of_it_is_sent() -> None:
    log, index, gaps = KvEventLog(), PrefixIndex(), []
    reader = KvEventReader(log)
    for number in range(2 * NAMES_A_MESSAGE + 1):
        log.stored(block_hash(None, (number,)))
    while (message := reader.next_events()) is not None:
        index.apply(A, message)
        gaps.append(index.gaps.any)
    assert gaps == [True, True, False]


def test_evicted_keys_are_a_gap_of_all_workers_until_they_resend_or_go() -> None:
    index = PrefixIndex(8)
    index.apply(A, events(1, *range(1, 8), cleared=True))
    index.apply(B, events(1, cleared=True))
    assert not index.gaps.any
    index.apply(A, events(2, *range(8, 12)))
    index.apply(A, events(3, removed=tuple(range(1, 12))))
    assert index.gaps.any, "that there is room again brings no key back"
    index.apply(A, events(4, 1, cleared=True))
    assert index.gaps.any, "B may hold evicted ones, too"
    index.forget(B)
    assert not index.gaps.any


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
def test_block_sizes_are_never_compared(prompt: int, by_a: int, by_b: int) -> None:
    """Worker a has blocks of 16 tokens, b of 32: each is asked for its own, and its hits are in its own blocks."""
    tokens = list(range(200))
    index, keys = holding(a=(), b=()), {size: block_keys(tokens[:prompt], size, b"", 99) for size in (16, 32)}
    index.apply(A, events(2, *block_keys(tokens[:by_a], 16, b"", 99)))
    index.apply(B, events(2, *block_keys(tokens[: by_b // 2], 32, b"", 99)))
    index.expect([B], block_keys(tokens[:by_b], 32, b"", 99), 0.0)
    hits = index.hits_of(keys, 0.0)
    assert hits.blocks(index.slot_of(A)) == min(prompt, by_a) // 16
    assert hits.blocks(index.slot_of(B)) == min(prompt, by_b) // 32
    only = index.hits_of({16: keys[16]}, 0.0)
    assert only.blocks(index.slot_of(B)) == 0
    assert not index.hits_of({}, 0.0)


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


@pytest.mark.parametrize("field", ["in_host", "on_disk"])
def test_names_below_the_pool_need_tiers(field: str) -> None:
    index = PrefixIndex()
    with pytest.raises(InvalidArgumentError) as caught:
        index.apply(A, registry_pb2.CacheEvents(sequence=1, cleared=True, **{field: names(1)}))  # type: ignore[arg-type]
    assert caught.value.field == "cache_events.tiered"
    assert index.slot_of(A) == -1


def test_the_lists_of_a_message_have_a_bound_together() -> None:
    most, index = bytes(8 * 2**17), PrefixIndex()
    full = registry_pb2.CacheEvents(sequence=1, cleared=True, tiered=True, stored=most, on_disk=most)
    index.apply(A, full)
    full.sequence, full.removed = 2, names(1)
    with pytest.raises(InvalidArgumentError, match="262144") as caught:
        index.apply(A, full)
    assert caught.value.field == "cache_events"


def test_sixteen_holders_with_tiers_keep_their_depths() -> None:
    held = {slot: slot + 1 for slot in range(48)}
    assert [limited(list(PrefixHits.of(held).levels)).blocks(slot) for slot in held] == list(held.values())


@given(st.dictionaries(st.integers(0, 300), st.integers(1, 40), max_size=60), st.integers(1, 310))
@example(held={slot: slot + 2 for slot in range(16)} | {16: 1}, count=1)
def test_hits_by_slot_say_the_same_in_both_forms(held: dict[int, int], count: int) -> None:
    hits = PrefixHits.of(held)
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
