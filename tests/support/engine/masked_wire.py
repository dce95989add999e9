"""A simulated engine whose KV travels in wire blocks of its own, each byte inverted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.runner.simulated_runner import SimulatedRunner
from kv_transfer.transports.transport import KvMemoryRegion
from kv_transfer.wire_format import KvWire
from splitserve.config.engine import EngineConfig


class MaskedWire(KvWire):
    """Wire blocks that are no KV until they are unpacked, and no use until they are packed."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._pool = runner.pool
        self._blocks = np.zeros_like(runner.pool)
        self._memory = replace(
            runner.pool_memory,
            base_address=self._blocks.ctypes.data,
            num_blocks=runner.num_blocks,
            probe_blocks=0,
        )

    @property
    def memory(self) -> KvMemoryRegion:
        return self._memory

    def pack(self, block_ids: Sequence[int]) -> None:
        blocks = list(block_ids)
        self._blocks[blocks] = ~self._pool[blocks]

    def unpack(self, block_ids: Sequence[int], peer_order: str = "") -> None:
        blocks = list(block_ids)
        self._pool[blocks] = ~self._blocks[blocks]

    def read_blocks(self, block_ids: Sequence[int], peer_order: str = "") -> Sequence[memoryview]:
        return [memoryview(self._blocks[block]) for block in block_ids]


class MaskedRunner(SimulatedRunner):
    """A `SimulatedRunner` with a `MaskedWire`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._wire = MaskedWire(self)

    @property
    def wire(self) -> KvWire:
        return self._wire
