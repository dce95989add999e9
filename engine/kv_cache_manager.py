"""Gives sequences their KV blocks and finds what the prefix cache already holds."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from splitserve.block_hashes import extend_block_hashes


class KVCacheManager:
    """Block tables over a `BlockPool`. `block_size` is in tokens."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_cache: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_cache = prefix_cache

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def computed_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Cached blocks that hold the beginning of the sequence, at most `max_tokens` of it.

        Full blocks only. Gives no ownership. Costs O(hits): nothing behind the first miss is hashed yet.
        """
        hits: list[int] = []
        if not self._prefix_cache:
            return hits
        hashes = sequence.block_hashes
        for index in range(max_tokens // self.block_size):
            if index == len(hashes):
                self._extend_hashes(sequence, index + 1)
            block = self.pool.lookup(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def start(self, sequence: Sequence, *, spare: int, writer: bool = False) -> list[int] | None:
        """Gives a sequence blocks for all its tokens, sharing what is cached; returns the fresh ones.

        None, and nothing changed, when fewer than `spare` blocks would stay free. A sequence that is to
        be computed here keeps at least its last token uncached, for its logits are needed; one whose KV a
        `writer` brings may be cached wholly, and its fresh blocks belong to the writer, too.
        """
        total = len(sequence.tokens)
        hits = self.computed_prefix(sequence, total if writer else total - 1)
        fresh_count = self.blocks_for(total) - len(hits)
        if fresh_count + self.pool.unowned(hits) + spare > self.pool.free:
            return None
        self.pool.share(hits)
        fresh = self.pool.allocate(fresh_count, after=hits[-1] if hits else None, writer=writer)
        sequence.block_ids = hits + fresh
        sequence.cached_blocks = len(hits)
        sequence.num_computed = sequence.cached_tokens = len(hits) * self.block_size
        if writer and self._prefix_cache:  # now, while the peer computes, rather than when its KV is there
            self._extend_hashes(sequence, total // self.block_size)
        return fresh

    def grow(self, sequence: Sequence) -> bool:
        """Extends the block table over all tokens; False, and nothing changed, when blocks are lacking."""
        missing = self.blocks_for(len(sequence.tokens)) - len(sequence.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.free:
            return False
        after = sequence.block_ids[-1] if sequence.block_ids else None
        sequence.block_ids.extend(self.pool.allocate(missing, after=after))
        return True

    def cache_computed(self, sequence: Sequence) -> None:
        """Gives the prefix cache every block that is full of computed tokens by now."""
        full = sequence.num_computed // self.block_size
        if not self._prefix_cache or full <= sequence.cached_blocks:
            return
        self._extend_hashes(sequence, full)
        for index in range(sequence.cached_blocks, full):
            self.pool.cache(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.cached_blocks = full

    def free(self, sequence: Sequence) -> None:
        """The request lets go of all its blocks."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = sequence.cached_blocks = 0

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        salt = sequence.request.cache_salt
        extend_block_hashes(sequence.block_hashes, sequence.tokens, self.block_size, salt, num_blocks)
