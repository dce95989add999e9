"""Allocates KV blocks for sequences, sharing those that the prefix cache already has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from engine.core.engine import Then
from engine.core.sequence import Sequence, SequenceStatus
from engine.core.types import EngineRequest
from engine.kv_cache.block_pool import BlockCounts, BlockPool
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.tier_index import TierBlock
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from splitserve.generation.kv_blocks import blocks_for, extend_block_hashes

_table_ids = count(1)
"""Of the process: a runner may outlive the engine that it computed for."""


class KVCacheManager:
    """Block tables over a `BlockPool`, and `tiers` below it, if any. `block_size` is in tokens."""

    def __init__(
        self, pool: BlockPool, block_size: int, *, prefix_cache: bool = True, tiers: KvTiers | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._tiers = tiers
        self.reading: set[Sequence] = set()
        """Those that wait for a read and have no blocks meanwhile; they are in no queue."""
        self._kept: dict[Sequence, int] = {}
        """Free blocks that are left to some of them by those that come after them."""
        self.reading_tokens = 0
        """That they have to compute at most."""

    def computed_prefix(self, sequence: Sequence, max_tokens: int, first: int = 0) -> list[int]:
        """Cached blocks with the KV of the sequence's first tokens, of `max_tokens` at most, from the block `first` on.

        Full blocks only. Takes no ownership. Costs O(hits): blocks are hashed only up to the first miss.
        """
        hits: list[int] = []
        if not self._prefix_cache:
            return hits
        hashes = sequence.block_hashes
        for index in range(first, max_tokens // self.block_size):
            if index == len(hashes):
                self._extend_hashes(sequence, index + 1)
            block = self.pool.lookup(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def counts(self) -> BlockCounts:
        """The pool's blocks by owner, and how many of the free ones are kept."""
        counts = self.pool.counts()
        return replace(counts, kept=sum(self._kept.values())) if self._kept else counts

    def expect(self, sequence: Sequence) -> None:
        """Brings a waiting sequence's `expected_cached` up to date.

        The last token does not count: its logits are needed. Costs O(1), and O(blocks) of what was cached or evicted
        since the last call.
        """
        known = sequence.expected_cached // self.block_size
        while known and self.pool.lookup(sequence.block_hashes[known - 1]) is None:
            known -= 1  # ends are evicted first
        found = self.computed_prefix(sequence, len(sequence.tokens) - 1, first=known)
        sequence.expected_cached = (known + len(found)) * self.block_size

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidArgumentError for a prefix that does not end with a block, and FailedPreconditionError
        (NO_PREFIX_FETCH) for any without a prefix cache."""
        if request.prefix_only and not self._prefix_cache:
            message = "prefix_only: this worker keeps no prefix cache"
            raise FailedPreconditionError(message, reason="NO_PREFIX_FETCH", field="prefix_only")
        if request.prefix_only and len(request.token_ids) % self.block_size:
            message = (
                f"token_ids must be whole blocks of {self.block_size} tokens, as only a prefix is wanted"
            )
            raise InvalidArgumentError(message, field="token_ids")

    def bring(self, sequence: Sequence, then: Callable[[Sequence], None]) -> None:
        """Calls `then`: at once, or when blocks of the sequence's prefix that lower tiers have are in the pool.

        Raises ResourceExhaustedError as `KvTiers.bring`, for a prefix that a peer fetches; where that is known only
        later, it is the sequence's `refusal`."""
        if not self._looks_up(sequence, then) and not self.reads(sequence, then):
            then(sequence)

    def _looks_up(self, sequence: Sequence, then: Callable[[Sequence], None]) -> bool:
        """Whether a store that workers share is asked for what no tier here knows of; what it has is read then."""
        look_ups = self._tiers.look_ups if self._tiers is not None else None
        if look_ups is None:
            return False
        usable = _usable_tokens(sequence)
        hits, blocks = len(self.computed_prefix(sequence, usable)), usable // self.block_size
        if hits + len(self._below(sequence, hits)) >= blocks:
            return False
        answered = partial(self._read_on, sequence, then, -1)
        if not look_ups.ask(sequence.block_hashes, partial(self._hash, sequence), blocks, answered):
            return False
        self._waits(sequence)
        return True

    def reads(self, sequence: Sequence, then: Callable[[Sequence], None], beyond: int = -1) -> bool:
        """Whether blocks of the sequence's prefix are being read from lower tiers: only then `then` is called, once
        they are in the pool. A read of others is waited for if more than `beyond` blocks are in the pool."""
        if self._tiers is None:
            return False
        hits = self.computed_prefix(sequence, _usable_tokens(sequence))
        below = self._below(sequence, len(hits))
        whole = sequence.request.prefix_only
        if not below or (whole and (len(hits) + len(below)) * self.block_size < len(sequence.tokens)):
            return False
        again = partial(self._read_on, sequence, then, len(hits)) if len(hits) > beyond else None
        came = partial(self._came, sequence, then)
        owner = None if whole else sequence
        if not self._tiers.bring(hits, below, len(sequence.tokens), came, again, owner=owner, whole=whole):
            return False
        self._waits(sequence)
        return True

    def _waits(self, sequence: Sequence) -> None:
        if not sequence.request.prefix_only:  # nothing is computed for that
            self.reading.add(sequence)
            self.reading_tokens += sequence.remaining

    def read_ended(self, sequence: Sequence) -> None:
        """A sequence does not wait for a read any more, if it did."""
        if sequence in self.reading:
            self.reading.remove(sequence)
            self._kept.pop(sequence, None)
            self.reading_tokens -= sequence.remaining

    def _came(self, sequence: Sequence, then: Callable[[Sequence], None]) -> None:
        self.read_ended(sequence)
        then(sequence)

    def read_back(self, sequence: Sequence, bytes_per_s: float, then: Then, again: Then | None) -> bool:
        """Begins to read blocks of the sequence's prefix that lower tiers have; see `Engine.read_back`."""
        if self._tiers is None:
            return False
        hits = self.computed_prefix(sequence, len(sequence.tokens))
        below = self._below(sequence, len(hits))
        if again is not None and (look_ups := self._tiers.look_ups) is not None:
            blocks = _usable_tokens(sequence) // self.block_size
            unknown = blocks - len(hits) - len(below)
            spared_s = self._tiers.look_up_spares_s(hits, below, unknown, bytes_per_s) if unknown > 0 else 0.0
            extend = partial(self._hash, sequence)
            if spared_s > 0 and look_ups.ask(sequence.block_hashes, extend, blocks, again, spared_s):
                return True
        return bool(below) and self._tiers.read_back(hits, below, bytes_per_s, then)

    def reachable_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is cached now, here or in a lower tier. The last token does not count."""
        hits = len(self.computed_prefix(sequence, len(sequence.tokens) - 1))
        return (hits + len(self._below(sequence, hits))) * self.block_size

    def reads_again(self, sequence: Sequence, watermark: int, then: Callable[[Sequence], None]) -> bool:
        """The same of one that was preempted, when `start` would find the blocks for it: these stay free for it. Once
        more if what was read is gone before it has started; then it is computed."""
        if self._tiers is None or not sequence.reads_left:
            return False
        if self._needed(sequence) + watermark + self._kept_before(sequence) > self.pool.free:
            return False
        if not self._reads_and_keeps(sequence, then):
            return False
        sequence.reads_left -= 1
        return True

    def _reads_and_keeps(
        self, sequence: Sequence, then: Callable[[Sequence], None], beyond: int = -1
    ) -> bool:
        """As `reads`; the blocks that it will need beside those of the read are left to it meanwhile."""
        needed, free = self._needed(sequence), self.pool.free
        reads = self.reads(sequence, then, beyond)
        if reads:
            self._kept[sequence] = max(0, needed - (free - self.pool.free))
        return reads

    def _needed(self, sequence: Sequence) -> int:
        """Free blocks that `start` would take."""
        hits = self.computed_prefix(sequence, len(sequence.tokens) - 1)
        return blocks_for(len(sequence.tokens), self.block_size) - len(hits) + self.pool.unowned(hits)

    def _kept_before(self, sequence: Sequence) -> int:
        """Free blocks that are kept for those who wait for a read and come before this one. A read takes no longer than
        its limit, so nobody waits for long."""
        return sum(kept for owner, kept in self._kept.items() if not _yields(owner, sequence))

    def _read_on(self, sequence: Sequence, then: Callable[[Sequence], None], beyond: int) -> None:
        """What others have read is there, or is known of; a prompt may have more in the tiers."""
        reads = self._reads_and_keeps if sequence in self._kept else self.reads
        self.read_ended(sequence)
        try:
            if sequence.status is SequenceStatus.WAITING and reads(sequence, then, beyond):
                return
        except ResourceExhaustedError as refusal:
            sequence.refusal = refusal.with_traceback(None)
        then(sequence)

    def _below(self, sequence: Sequence, hits: int) -> list[bytes]:
        """Hashes of the blocks that follow the `hits` in the pool and that lower tiers have."""
        found: list[bytes] = []
        if self._tiers is None:
            return found
        hashes = sequence.block_hashes
        for index in range(hits, _usable_tokens(sequence) // self.block_size):
            if index == len(hashes):
                self._extend_hashes(sequence, index + 1)
            if self._tiers.places.of(hashes[index]) is None:
                break
            found.append(hashes[index])
        return found

    def start(self, sequence: Sequence, *, watermark: int, writer: bool = False) -> list[int] | None:
        """Allocates blocks for all of a sequence's tokens, sharing cached ones; returns the new ones.

        None, and nothing changed, if fewer than `watermark` blocks would stay free, beside those that are kept for one
        that comes before it and is read for. A sequence that is computed here
        has at least its last token computed, because its logits are needed. One whose KV a `writer` brings may be
        cached completely; its new blocks are owned by the writer, too.
        """
        total = len(sequence.tokens)
        hits = self.computed_prefix(sequence, total if writer else total - 1)
        fresh_count, kept = blocks_for(total, self.block_size) - len(hits), self._kept_before(sequence)
        if fresh_count + self.pool.unowned(hits) + watermark + kept > self.pool.free:
            return None
        if writer and self._prefix_cache:  # now, while the peer computes, rather than when its KV arrives
            self._extend_hashes(sequence, total // self.block_size)
        self.pool.share(hits)
        fresh = self.pool.allocate(fresh_count, after=hits[-1] if hits else None, writer=writer)
        sequence.block_ids = hits + fresh
        sequence.table_id = next(_table_ids)
        sequence.cached_blocks = len(hits)
        sequence.num_computed = sequence.cached_tokens = len(hits) * self.block_size
        if self._tiers is not None and hits:
            self._tiers.copies.used(hits, sequence.block_hashes[: len(hits)])
        return fresh

    def hold(self, sequence: Sequence) -> None:
        """Gives a sequence the cached blocks of all of its tokens, or none if one of them is not cached."""
        total = len(sequence.tokens)
        hits = self.computed_prefix(sequence, total)
        if len(hits) * self.block_size == total:
            self.pool.share(hits)
            sequence.block_ids = hits

    def grow(self, sequence: Sequence, *, ahead: int = 0, watermark: int = 0) -> bool:
        """Extends the block table to all tokens and `ahead` more; False, and nothing changed, if fewer than `watermark`
        blocks would stay free."""
        missing = blocks_for(len(sequence.tokens) + ahead, self.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        if missing + watermark > self.pool.free:
            return False
        after = sequence.block_ids[-1] if sequence.block_ids else None
        sequence.block_ids.extend(self.pool.allocate(missing, after=after))
        return True

    def grow_before_reads(self, sequence: Sequence) -> bool:
        """The same for a running sequence, and reads for those that come after it are given up where blocks are
        short: these have none of their own yet."""
        while not self.grow(sequence):
            reads = reversed(self._tiers.under_way) if self._tiers is not None else ()
            read = next(
                (one for one in reads if all(_yields(each.owner, sequence) for each in one.waiting)), None
            )
            if self._tiers is None or read is None:
                return False
            self._tiers.give_up(read)
        return True

    def cache_computed(self, sequence: Sequence) -> None:
        """Adds every block that is full of computed tokens to the prefix cache."""
        full = sequence.num_computed // self.block_size
        if not self._prefix_cache or full <= sequence.cached_blocks:
            return
        self._extend_hashes(sequence, full)
        for index in range(sequence.cached_blocks, full):
            self.pool.cache(sequence.block_ids[index], sequence.block_hashes[index])
        if self._tiers is not None:
            self._copy_down(sequence, full)
        sequence.cached_blocks = full

    def _copy_down(self, sequence: Sequence, full: int) -> None:
        """Offers the blocks that have just entered the prefix cache to the lower tiers."""
        assert self._tiers is not None
        hashes = sequence.block_hashes
        for index in range(sequence.cached_blocks, full):
            block = sequence.block_ids[index]
            if self.pool.lookup(hashes[index]) == block:
                self._tiers.copies.stored(
                    block, TierBlock(hashes[index], hashes[index - 1] if index else None, index)
                )

    def free(self, sequence: Sequence) -> None:
        """Releases all of a sequence's blocks."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.table_id = 0
        sequence.num_computed = sequence.cached_blocks = 0

    def close(self) -> None:
        """Closes the lower tiers, which copy from and to the pool's memory."""
        if self._tiers is not None:
            self._tiers.close()

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        self._hash(sequence, sequence.block_hashes, num_blocks)

    def _hash(self, sequence: Sequence, hashes: list[bytes], num_blocks: int) -> None:
        extend_block_hashes(hashes, sequence.tokens, self.block_size, sequence.request.cache_salt, num_blocks)


def _usable_tokens(sequence: Sequence) -> int:
    """How many leading tokens may be cached: not the last one, whose logits are needed, unless nothing is computed."""
    return len(sequence.tokens) - (not sequence.request.prefix_only)


def _yields(owner: object, running: Sequence) -> bool:
    """Whether who waits for a read has ended, or comes after a running sequence."""
    if not isinstance(owner, Sequence):
        return False
    if owner.status is not SequenceStatus.WAITING or running.precedence.precedes(owner.precedence):
        return True
    return running.place < owner.place and not owner.precedence.precedes(running.precedence)
