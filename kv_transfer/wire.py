"""How KV blocks leave and reach a worker: as they lie in its pool, or in a narrower type beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_transfer.layout import SAME
from kv_transfer.transport import PoolMemory
from kv_transfer.verify import BlockReader
from splitserve.errors import ConfigError

NARROWED_DTYPE = "bfloat16"
"""The one KV type that can travel narrower. float32 is for exactness, which a narrower type would undo."""


class KvWire(ABC):
    """The memory that peers write to and read from. Wire block i stands for KV block i and shares its owners.

    So who may write, and when a block comes back, is decided for both at once; no rule of tickets, reservations
    or quarantine knows the type. Used from the engine thread only.
    """

    @property
    @abstractmethod
    def memory(self) -> PoolMemory:
        """What to register with the transport; its layout is that of the wire."""

    @abstractmethod
    def pack(self, block_ids: Sequence[int]) -> None:
        """Makes the wire blocks of these final KV blocks ready to be sent.

        Packing the same KV again leaves every byte as it is, so a block of a shared prefix may be packed while
        another request's write still reads it.
        """

    @abstractmethod
    def unpack(self, block_ids: Sequence[int]) -> None:
        """Fills these KV blocks from their wire blocks; while the writer's hold on them lasts."""

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The bytes of each wire block in host memory, for checksums."""


class PlainWire(KvWire):
    """KV travels as it is: from pool to pool."""

    def __init__(self, memory: PoolMemory, read_blocks: BlockReader) -> None:
        self._memory = memory
        self._read_blocks = read_blocks

    @property
    def memory(self) -> PoolMemory:
        """The KV pool."""
        return self._memory

    def pack(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def unpack(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """See `KvWire`."""
        return self._read_blocks(block_ids)


def check_wire_dtype(wire_dtype: str, kv_dtype: str) -> None:
    """Raises ConfigError when KV of `kv_dtype` cannot travel as `wire_dtype`."""
    if wire_dtype != SAME and kv_dtype != NARROWED_DTYPE:
        message = f"wire_dtype: {wire_dtype} is for KV in {NARROWED_DTYPE}; this engine's is {kv_dtype}"
        raise ConfigError(message, field="wire_dtype")
