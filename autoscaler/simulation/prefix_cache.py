"""A prefix cache as a count of blocks: which leading blocks of a prompt are held, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from autoscaler.simulation.trace import BLOCK_TOKENS


class PrefixCache:
    """Blocks of 512 tokens by their ids. An id stands for its block and all before it."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = max(1, capacity_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.changes: dict[int, bool] | None = None
        """Where somebody keeps track: blocks that came (True) or went since this was emptied."""

    def cached_tokens(self, block_ids: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the prompt that need not be computed; at least the last one always must."""
        hits = 0
        for block in block_ids:
            if block not in self._blocks:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, prompt_tokens - 1)

    def keep(self, block_ids: Sequence[int]) -> None:
        """Holds the blocks of a computed prompt."""
        # The last block goes in first, so that a chain loses its end before its beginning.
        for block in reversed(block_ids):
            if self.changes is not None and block not in self._blocks:
                self.changes[block] = True
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            gone, _ = self._blocks.popitem(last=False)
            if self.changes is not None:
                self.changes[gone] = False
