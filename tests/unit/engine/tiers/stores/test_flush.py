"""An orderly end waits for blocks on their way down, for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.tiers.tier_index import TierBlock
from tests.support.engine.engine_rig import BLOCK, request
from tests.support.tiers.tiers_rig import FailingStore, TieredRig
from tests.support.waiting import PATIENCE_S

BYTES = BLOCK * 16
PROMPT = list(range(40, 80))


class GatedStore(FailingStore):
    """Writes wait for `may_write`."""

    def __init__(self) -> None:
        super().__init__(64, BYTES)
        self.may_write, self.begun, self.written = threading.Event(), threading.Event(), list[bytes]()

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        self.begun.set()
        self.may_write.wait(PATIENCE_S)
        super().write(slot, block, content)
        self.written.append(block.block_hash)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    made = GatedStore()
    yield made
    made.may_write.set()


def rig_with(store: GatedStore) -> TieredRig:
    """A rig whose blocks have all begun to be copied down, and none is on the disk."""
    rig = TieredRig(64, store, num_blocks=24)
    rig.core.add_request(request("one", PROMPT, max_tokens=3))
    rig.run()
    return rig


def test_all_blocks_on_their_way_are_written(store: GatedStore) -> None:
    rig = rig_with(store)
    opener = threading.Timer(0.05, store.may_write.set)
    opener.start()
    assert rig.below.copies.under_way >= len(PROMPT) // BLOCK
    rig.below.flush(PATIENCE_S)
    assert rig.below.copies.under_way == 0
    assert not rig.below.busy
    assert len(store.written) >= len(PROMPT) // BLOCK
    rig.below.close()
    opener.join()


def test_a_disk_that_does_not_write_is_not_waited_for_longer(
    store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_with(store)
    with caplog.at_level("WARNING", "splitserve"):
        rig.below.flush(0.1)
    (record,) = caplog.records
    assert record.getMessage() == "kv_tier.not_written"
    assert vars(record)["event_fields"]["blocks"] == rig.below.copies.under_way > 0
    store.may_write.set()
    rig.below.close()


def test_what_cannot_be_written_is_not_waited_for(store: GatedStore) -> None:
    store.full = True
    store.may_write.set()
    rig = rig_with(store)
    rig.below.flush(PATIENCE_S)
    assert rig.below.copies.under_way == 0
    assert rig.below.disk is not None
    assert rig.below.disk.stats.failures["write"] > 0
    rig.below.close()


def test_without_a_disk_and_with_nothing_under_way_it_returns_at_once() -> None:
    rig = TieredRig(64, num_blocks=24)
    rig.below.flush(PATIENCE_S)
    rig.core.add_request(request("one", PROMPT, max_tokens=3))
    rig.run()
    rig.below.flush(PATIENCE_S)
    assert rig.below.copies.under_way == 0
    rig.below.close()
