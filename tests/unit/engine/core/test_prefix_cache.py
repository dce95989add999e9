"""Block hashes and the KV cache manager's prefix hits."""

from __future__ import annotations

import hashlib

import cbor2
import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.core.scheduler import KVCacheManager
from engine.core.sequence import Sequence
from engine.kv_cache.block_pool import BlockPool
from splitserve.generation.kv_blocks import block_hash, blocks_for, extend_block_hashes


def make_sequence(tokens: list[int], salt: bytes = b"") -> Sequence:
    stop = StopParams(max_tokens=8)
    return Sequence(EngineRequest("r", tuple(tokens), SamplingParams(), stop, cache_salt=salt), 0)


def make_manager(num_blocks: int = 16, *, prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), 4, prefix_cache=prefix_cache)


def compute(manager: KVCacheManager, tokens: list[int], salt: bytes = b"") -> Sequence:
    sequence = make_sequence(tokens, salt)
    assert manager.start(sequence, watermark=0) is not None
    sequence.num_computed = len(tokens)
    manager.cache_computed(sequence)
    return sequence


def test_the_hash_is_chained_sha256_over_cbor() -> None:
    first = block_hash(None, [1, 2], [b"tenant"])
    assert first == hashlib.sha256(cbor2.dumps([None, [1, 2], [b"tenant"]])).digest()
    hashes: list[bytes] = []
    extend_block_hashes(hashes, [1, 2, 3, 4, 5], 2, b"tenant", 2)
    assert hashes == [first, block_hash(first, [3, 4])]


def test_salts_and_earlier_tokens_separate_every_later_block() -> None:
    names = []
    for tokens, salt in (
        ([1, 2, 3, 4], b""),
        ([1, 2, 3, 4], b"a"),
        ([1, 2, 3, 4], b"b"),
        ([9, 2, 3, 4], b""),
    ):
        hashes: list[bytes] = []
        extend_block_hashes(hashes, tokens, 2, salt, 2)
        names.append(hashes[1])
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("length", "writer", "cached"),
    [(3, False, 0), (4, False, 0), (5, False, 4), (8, False, 4), (9, False, 8), (8, True, 8), (7, True, 4)],
)
def test_hits_are_full_blocks_and_leave_the_last_token_to_compute(
    length: int, writer: bool, cached: int
) -> None:
    manager, tokens = make_manager(), list(range(12))
    manager.free(compute(manager, tokens))
    sequence = make_sequence(tokens[:length])
    fresh = manager.start(sequence, watermark=0, writer=writer)
    assert fresh is not None
    assert sequence.cached_tokens == sequence.num_computed == cached
    assert len(fresh) == blocks_for(length, manager.block_size) - cached // 4
    assert len(sequence.block_ids) == blocks_for(length, manager.block_size)


def test_an_unfilled_block_is_no_hit() -> None:
    manager, tokens = make_manager(), list(range(8))
    first = make_sequence(tokens)
    manager.start(first, watermark=0)
    first.num_computed = 7
    manager.cache_computed(first)
    assert manager.computed_prefix(make_sequence(tokens), 8) == first.block_ids[:1]


def test_another_salt_never_hits() -> None:
    manager, tokens = make_manager(), list(range(8))
    compute(manager, tokens, b"a")
    assert manager.computed_prefix(make_sequence(tokens, b"b"), 8) == []
    assert manager.computed_prefix(make_sequence(tokens), 8) == []
    assert len(manager.computed_prefix(make_sequence(tokens, b"a"), 8)) == 2


def test_without_a_prefix_cache_nothing_hits() -> None:
    manager = make_manager(prefix_cache=False)
    manager.free(compute(manager, list(range(8))))
    assert manager.computed_prefix(make_sequence(list(range(8))), 8) == []


def test_a_start_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(4)
    held = compute(manager, list(range(8)))
    manager.free(held)
    keeper = compute(manager, list(range(100, 108)))
    # Two of its three blocks are cached but unowned: they count as free only once.
    sequence = make_sequence(list(range(12)))
    assert manager.start(sequence, watermark=0) is None
    assert (sequence.block_ids, manager.pool.free) == ([], 2)
    manager.free(keeper)
    assert manager.start(sequence, watermark=2) is None
    assert manager.start(sequence, watermark=1) is not None
    assert sequence.cached_tokens == 8
