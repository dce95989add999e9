"""The form in which KV blocks travel: as they lie in KV cache memory, or packed into a narrower type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.block_sizes import whole_blocks
from kv_transfer.layout import SAME
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.errors import ConfigError

NARROWED_DTYPE = "bfloat16"
"""The only KV dtype with a narrower wire type. float32 is used for exactness, which narrowing would defeat."""


class KvWire(ABC):
    """The registered memory that writes read from and peers write to. Wire block i belongs to KV block i.

    Both blocks always have the same owner, so tickets, reservations and quarantine are independent of the wire
    type. Used from the engine thread only.
    """

    @property
    @abstractmethod
    def memory(self) -> KvMemoryRegion:
        """The region to register with the transport, with the wire layout."""

    @abstractmethod
    def pack(self, block_ids: Sequence[int]) -> None:
        """Fills the wire blocks of these final KV blocks, ready to be sent.

        Deterministic: packing the same KV again changes no byte, so a block of a shared prefix may be packed while
        another request's write still reads it.
        """

    @abstractmethod
    def unpack(self, block_ids: Sequence[int]) -> None:
        """Fills these KV blocks from their wire blocks. Call before the blocks are released to the engine."""

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The bytes of each wire block in host memory, for checksums."""

    def read_sub_blocks(self, sub_blocks: Sequence[int], tokens: int) -> Sequence[bytes | memoryview]:
        """The bytes of each sub-block of `tokens` tokens, in the order of a block of that size.

        `tokens` divides the block size. For layouts whose blocks can be divided by tokens.
        """
        size = self.memory.layout.block_size_tokens
        if tokens == size:
            return self.read_blocks(sub_blocks)
        divisions, part = size // tokens, tokens * self.memory.layout.token_bytes
        blocks = whole_blocks(sub_blocks, divisions)
        parts = {
            block: np.frombuffer(read, np.uint8).reshape(-1, divisions, part)
            for block, read in zip(blocks, self.read_blocks(blocks), strict=True)
        }
        return [parts[number // divisions][:, number % divisions].tobytes() for number in sub_blocks]


class PlainWire(KvWire):
    """KV travels unchanged: the wire blocks are the KV blocks."""

    def __init__(self, memory: KvMemoryRegion, read_blocks: BlockReader) -> None:
        self._memory = memory
        self._read_blocks = read_blocks

    @property
    def memory(self) -> KvMemoryRegion:
        """The KV cache memory."""
        return self._memory

    def pack(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def unpack(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """See `KvWire`."""
        return self._read_blocks(block_ids)


def check_wire_dtype(wire_dtype: str, kv_dtype: str) -> None:
    """Raises ConfigError if KV of `kv_dtype` cannot travel as `wire_dtype`."""
    if wire_dtype != SAME and kv_dtype != NARROWED_DTYPE:
        message = f"wire_dtype: {wire_dtype} is for KV in {NARROWED_DTYPE}; this engine's is {kv_dtype}"
        raise ConfigError(message, field="wire_dtype")


BlockReader = Callable[[Sequence[int]], Sequence[memoryview]]
"""Returns the bytes of the blocks with these indices, in host memory."""
