"""How the blocks of a prefill worker map onto a decode worker's where their sizes differ. Pure.

One size divides the other. Both sides then number sub-blocks of the smaller size: block b of a worker whose blocks hold
n of them has the sub-blocks b * n to b * n + n - 1. A write pairs sub-blocks as it otherwise pairs blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from splitserve.generation.kv_blocks import blocks_for


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Of one pair of workers. Made by `block_sizes`."""

    writer: int
    """Tokens in a block of the writer."""
    reader: int
    """Tokens in a block of the reader."""
    tokens: int
    """Tokens in a sub-block."""
    of_writer: int
    """Sub-blocks in a block of the writer."""
    of_reader: int
    """Sub-blocks in a block of the reader."""

    def final(self, end_tokens: int, *, is_last: bool) -> int:
        """Leading sub-blocks of a sequence that may be written when the KV of `end_tokens` tokens is computed.

        Those of the writer's full blocks; with `is_last`, where nothing follows, all that hold tokens.
        """
        if is_last:
            return blocks_for(end_tokens, self.tokens)
        return end_tokens // self.writer * self.of_writer


@lru_cache(maxsize=64)
def block_sizes(writer: int, reader: int) -> BlockSizes:
    """The sizes of a pair, of which one divides the other."""
    tokens = min(writer, reader)
    return BlockSizes(writer, reader, tokens, writer // tokens, reader // tokens)


def sub_blocks(blocks: Sequence[int], divisions: int) -> Sequence[int]:
    """The numbers of all sub-blocks of blocks, in order; the blocks themselves where they are not divided."""
    if divisions == 1:
        return blocks
    return tuple(block * divisions + part for block in blocks for part in range(divisions))


def whole_blocks(numbers: Sequence[int], divisions: int) -> Sequence[int]:
    """The blocks that sub-blocks are part of, each once, in order."""
    if divisions == 1:
        return numbers
    return tuple(dict.fromkeys(number // divisions for number in numbers))
