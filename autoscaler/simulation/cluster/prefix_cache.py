"""The prefix cache of simulated replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from autoscaler.simulation.traces.trace import BLOCK_TOKENS


class CacheChanges(NamedTuple):
    """Ids of the trace blocks that a prefix cache stored, parents first, and of those that it evicted."""

    stored: list[int]
    removed: list[int]


class PrefixCache:
    """LRU cache of 512-token blocks. An id names its block together with all blocks before it."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = max(1, capacity_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.changes: dict[int, bool] = {}
        """Blocks stored (True) or evicted (False) since the last `take_changes`."""

    def take_changes(self) -> CacheChanges:
        """The changes since the last call."""
        changes, self.changes = self.changes, {}
        # Parents first: the cache inserts a prompt's blocks from its end.
        stored = [block for block, is_stored in reversed(changes.items()) if is_stored]
        return CacheChanges(stored, [block for block, is_stored in changes.items() if not is_stored])

    def cached_tokens(self, block_ids: Sequence[int], prompt_tokens: int) -> int:
        """Prompt tokens that are cached. The last token is always computed."""
        hits = 0
        for block in block_ids:
            if block not in self._blocks:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, prompt_tokens - 1)

    def keep(self, block_ids: Sequence[int], taken_tokens: int = 0) -> None:
        """Stores the blocks of a prompt and evicts the least recently used blocks beyond the capacity, of which
        sequences use `taken_tokens`."""
        blocks, changes = self._blocks, self.changes
        # The last block goes in first, so that eviction shortens a chain from its end.
        for block in reversed(block_ids):
            if block in blocks:
                blocks.move_to_end(block)
                continue
            blocks[block] = None
            changes[block] = True
        room = max(0, self._capacity - taken_tokens // BLOCK_TOKENS)
        for _ in range(len(blocks) - room):
            evicted, _ = blocks.popitem(last=False)
            changes[evicted] = False
