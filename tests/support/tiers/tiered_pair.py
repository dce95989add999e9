"""Prefill and decode engines stepped by hand, with tiers below the decode engine's pool."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.tiers.kv_tiers import KvTiers
from engine.tiers.pool_copier import HostPoolCopier
from engine.tiers.stores.block_store import BlockStore, HostStore
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.alarms import Alarms
from tests.support.engine.connector_pair import ConnectorPair
from tests.support.waiting import PATIENCE_S


class TieredPair(ConnectorPair):
    def __init__(
        self,
        host_blocks: int,
        disk: Callable[[int], BlockStore] | None = None,
        num_blocks: int = 16,
        alarms: Alarms | None = None,
    ) -> None:
        """`disk` makes the lower tier, from the bytes of a block. `alarms`: rung by hand, if given."""
        self.woken = threading.Event()
        self.alarms = alarms

        def below(memory: KvMemoryRegion) -> KvTiers:
            size = memory.layout.block_bytes
            host = HostStore(memoryview(bytearray(host_blocks * size)), size)
            store = disk(size) if disk is not None else None
            tokens = memory.layout.block_size_tokens
            tiers = KvTiers(HostPoolCopier(memory), host, store, tokens, alarms=self.alarms)
            tiers.wake = self.woken.set
            return tiers

        super().__init__(num_blocks=num_blocks, below=below)

    @property
    def below(self) -> KvTiers:
        assert self.tiers is not None
        return self.tiers

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Lets the tiers' threads work until nothing is on its way, or something has come about."""
        done = until or (lambda: not self.below.busy)
        while not done():
            if self.woken.wait(0.05):
                self.woken.clear()
                self.below.collect()
        self.below.collect()

    def rounds(self, until: Callable[[], bool]) -> None:
        """Steps both engines and lets blocks be copied."""
        for _ in range(200):
            if until():
                return
            self.round()
            while self.below.copying_blocks:
                assert self.woken.wait(PATIENCE_S)
                self.woken.clear()
                self.below.collect()
        raise AssertionError("it never came about")
