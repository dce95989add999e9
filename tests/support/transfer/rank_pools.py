"""KV pools in plain memory that tensor-parallel ranks hold a part of, each with heads outermost in a layer's piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import HEADS_OUTERMOST, KvLayout, held_heads
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.sharded import ShardedTransport
from kv_transfer.transports.transport import TransferEndpoint, Transport

LAYERS, HEAD_BYTES = 3, 16 * 2 * 8
LAYOUT = KvLayout("f" * 64, "uint8", 16, LAYERS, 4, 8, axis_order="tests" + HEADS_OUTERMOST)


class RankPools:
    """`data[rank]` is `[layers, blocks, heads of the rank, bytes of a head]`, uint8; HEAD_BYTES by default."""

    def __init__(
        self,
        num_blocks: int,
        ranks: int,
        kv_heads: int = 4,
        block_size: int = LAYOUT.block_size_tokens,
        axis_order: str = LAYOUT.axis_order,
    ) -> None:
        self.layout = replace(
            LAYOUT,
            num_kv_heads=kv_heads,
            tensor_parallel_size=ranks,
            block_size_tokens=block_size,
            axis_order=axis_order,
        )
        head_bytes = 2 * block_size * LAYOUT.head_dim
        self.held = [held_heads(ranks, rank, kv_heads) for rank in range(ranks)]
        self.data: list[npt.NDArray[np.uint8]] = [
            np.zeros((LAYERS, num_blocks, len(held), head_bytes), dtype=np.uint8) for held in self.held
        ]
        self.regions = [
            KvMemoryRegion(part.ctypes.data, num_blocks, self.layout.rank, layer_stride=part[0].nbytes)
            for part in self.data
        ]
        self.memory = replace(self.regions[0], layout=self.layout)
        if ranks > 1:
            self.memory = replace(self.memory, base_address=0, layer_stride=0)

    def transport(self, make: Callable[[], Transport]) -> tuple[ShardedTransport, TransferEndpoint]:
        """A worker's transport over these pools, and its endpoint as peers get it."""
        if len(self.regions) == 1:
            transport = ShardedTransport(make())
        else:
            ranks: Sequence[Transport] = [make() for _ in self.regions]
            parts = [rank.register_memory(pool) for rank, pool in zip(ranks, self.regions, strict=True)]
            transport = ShardedTransport(make(), ranks, parts)
        endpoint = transport.register_memory(self.memory)
        return transport, TransferEndpoint.from_proto(endpoint.to_proto())

    def fill(self, whole: npt.NDArray[np.uint8]) -> None:
        """Gives each rank its heads of `whole`, uint8 `[layers, blocks, heads, HEAD_BYTES]`."""
        for part, held in zip(self.data, self.held, strict=True):
            part[:] = whole[:, :, held.start : held.stop]

    def assert_holds(self, whole: npt.NDArray[np.uint8]) -> None:
        """All ranks hold their heads of `whole`, and nothing else."""
        for part, held in zip(self.data, self.held, strict=True):
            np.testing.assert_array_equal(part, whole[:, :, held.start : held.stop])
