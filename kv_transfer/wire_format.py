"""The form in which KV blocks travel: as they lie in KV cache memory, or packed into a narrower type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set

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

    def populate(self) -> bool:
        """Populates some memory of its own, in idle time; whether there was any left."""
        return False

    @property
    def own_bytes(self) -> int:
        """Memory of its own, beside that of the KV blocks."""
        return 0

    def give_up(self) -> None:
        """Gives up memory of its own while the KV blocks have none."""
        return

    def take_back(self) -> None:
        """Takes it back. The caller has seen that `own_bytes` are free, with what else it takes back."""
        return

    @abstractmethod
    def pack(self, block_ids: Sequence[int]) -> None:
        """Fills the wire blocks of these final KV blocks, ready to be sent.

        Deterministic: packing the same KV again changes no byte, so a block of a shared prefix may be packed while
        another request's write still reads it.
        """

    @abstractmethod
    def unpack(self, block_ids: Sequence[int], peer_order: str = "") -> None:
        """Fills these KV blocks from their wire blocks. Call before the blocks are released to the engine.

        `peer_order` is the writer's `axis_order` where it is not this side's.
        """

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int], peer_order: str = "") -> Sequence[memoryview]:
        """The bytes of each wire block in host memory, for checksums.

        With `peer_order`, the other side's `axis_order` where it is not this side's, the bytes as they travel, layer by
        layer.
        """

    @property
    def orders(self) -> Set[str]:
        """What `peer_order` may be. None by default: peers have this side's order."""
        return frozenset()

    def read_sub_blocks(
        self, sub_blocks: Sequence[int], tokens: int, peer_order: str = ""
    ) -> Sequence[bytes | memoryview]:
        """The bytes of each sub-block of `tokens` tokens, in the order of a block of that size.

        `tokens` divides the block size. For layouts whose blocks can be divided by tokens. With `peer_order` blocks are
        not divided.
        """
        size = self.memory.layout.block_size_tokens
        if tokens == size:
            return self.read_blocks(sub_blocks, peer_order)
        divisions, part = size // tokens, tokens * self.memory.layout.token_bytes
        blocks = whole_blocks(sub_blocks, divisions)
        parts = {
            block: np.frombuffer(read, np.uint8).reshape(-1, divisions, part)
            for block, read in zip(blocks, self.read_blocks(blocks), strict=True)
        }
        return [parts[number // divisions][:, number % divisions].tobytes() for number in sub_blocks]


class OrderConverter(ABC):
    """Puts blocks that arrived in another engine's `axis_order` into this worker's own, where they lie."""

    @property
    @abstractmethod
    def orders(self) -> Set[str]:
        """The other orders that it knows."""

    @abstractmethod
    def convert(self, block_ids: Sequence[int], peer_order: str) -> None:
        """Rewrites each block, once: a second time is an error of the caller that nothing detects."""

    @abstractmethod
    def read_blocks(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The bytes of each block in host memory, as they lie, layer by layer."""


class PlainWire(KvWire):
    """KV travels unchanged: the wire blocks are the KV blocks.

    With a `converter` peers may have other orders. Its blocks are converted by whoever receives them.
    """

    def __init__(
        self,
        memory: Callable[[], KvMemoryRegion],
        read_blocks: BlockReader,
        converter: OrderConverter | None = None,
    ) -> None:
        """`memory`: where the KV blocks are now; a device's are elsewhere after a sleep."""
        self._memory = memory
        self._read_blocks = read_blocks
        self._converter = converter

    @property
    def memory(self) -> KvMemoryRegion:
        """The KV cache memory."""
        return self._memory()

    def pack(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""

    def unpack(self, block_ids: Sequence[int], peer_order: str = "") -> None:
        """Converts blocks in another order; else nothing to do."""
        if self._converter is not None and peer_order:
            self._converter.convert(block_ids, peer_order)

    def read_blocks(self, block_ids: Sequence[int], peer_order: str = "") -> Sequence[memoryview]:
        """See `KvWire`."""
        if self._converter is not None and peer_order:
            return self._converter.read_blocks(block_ids)
        return self._read_blocks(block_ids)

    @property
    def orders(self) -> Set[str]:
        """See `KvWire`."""
        return self._converter.orders if self._converter is not None else frozenset()


def check_wire_dtype(wire_dtype: str, kv_dtype: str) -> None:
    """Raises ConfigError if KV of `kv_dtype` cannot travel as `wire_dtype`."""
    if wire_dtype != SAME and kv_dtype != NARROWED_DTYPE:
        message = f"wire_dtype: {wire_dtype} is for KV in {NARROWED_DTYPE}; this engine's is {kv_dtype}"
        raise ConfigError(message, field="wire_dtype")


BlockReader = Callable[[Sequence[int]], Sequence[memoryview]]
"""Returns the bytes of the blocks with these indices, in host memory."""
