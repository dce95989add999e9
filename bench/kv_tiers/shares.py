"""Hit shares by replay: the pool and the tiers keep their books, nothing is computed and no time passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.tiers.tier_index import Eviction, TierBlock, TierIndex


@dataclass(frozen=True)
class ReplayedPrompt:
    """Hashes of a prompt's blocks, and its tokens; `block_tokens` each but for the last."""

    hashes: Sequence[bytes]
    tokens: int
    block_tokens: int


@dataclass(frozen=True)
class ShareRow:
    """Blocks in the pool and below it, and the share of prompt tokens that were found there."""

    trace: str
    pool_blocks: int
    host_blocks: int
    disk_blocks: int
    eviction: Eviction
    hit_share: float
    hit_share_endless: float
    """Of a cache that keeps everything."""

    @property
    def of_endless(self) -> float:
        """The share of those of an endless cache."""
        return self.hit_share / self.hit_share_endless if self.hit_share_endless else 1.0


def share_of(
    prompts: Iterable[ReplayedPrompt],
    pool_blocks: int,
    host_blocks: int,
    disk_blocks: int,
    eviction: Eviction,
) -> float:
    """The share of prompt tokens that pool or tiers have when their prompt comes. The pool evicts by age."""
    levels = [TierIndex(pool_blocks, "age")]
    levels += [TierIndex(blocks, eviction) for blocks in (host_blocks, disk_blocks) if blocks]
    hits = tokens = 0
    for prompt in prompts:
        known = 0
        for block_hash in prompt.hashes:
            if not any(block_hash in level for level in levels):
                break
            known += 1
        tokens += prompt.tokens
        hits += min(known * prompt.block_tokens, prompt.tokens - 1)
        for level in levels:
            level.touch(prompt.hashes[:known])
            for depth, block_hash in enumerate(prompt.hashes):
                if level.knows(block_hash):
                    continue
                parent = prompt.hashes[depth - 1] if depth else None
                if level.add(TierBlock(block_hash, parent, depth)) is not None:
                    level.ready(block_hash)
    return hits / max(1, tokens)


def share_rows(
    trace: str, prompts: Sequence[ReplayedPrompt], sizes: Iterable[tuple[int, int, int]]
) -> list[ShareRow]:
    """A row for each of these sizes of pool, host memory and disk, and for each way to evict."""
    everything = len({block_hash for prompt in prompts for block_hash in prompt.hashes})
    endless = share_of(prompts, everything, 0, 0, "age")
    rows = []
    for pool, host, disk in sizes:
        ways: tuple[Eviction, ...] = ("history", "age") if host else ("age",)
        for eviction in ways:
            share = share_of(prompts, pool, host, disk, eviction)
            rows.append(ShareRow(trace, pool, host, disk, eviction, share, endless))
    return rows
