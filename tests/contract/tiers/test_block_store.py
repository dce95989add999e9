"""The rules that the store of every tier keeps: what is read is what was written, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engine.tiers.stores.block_store import BlockStore, HostStore
from engine.tiers.stores.disk_store import DiskStore, open_disk_store
from tests.support.tiers.mooncake_rig import mooncake_store
from tests.support.tiers.tiers_rig import FailingStore, chain, damage, disk_bytes

SLOTS, BYTES = 6, 512
IDENTITY = bytes(32)
Make = Callable[[Path], BlockStore]


def _disk(folder: Path) -> DiskStore:
    return open_disk_store(folder, IDENTITY, BYTES, disk_bytes(SLOTS, BYTES))


def _damaging(folder: Path) -> BlockStore:
    """A disk that changes a byte of every third slot after it was written."""

    class Damaging(DiskStore):
        def write(self, slot, block, content) -> None:  # type: ignore[no-untyped-def]
            super().write(slot, block, content)
            if slot % 3 == 0:
                damage(self, slot)

    store = _disk(folder)
    store.__class__ = Damaging
    return store


def _failing(_: Path) -> BlockStore:
    store = FailingStore(SLOTS, BYTES)
    store.flip = lambda slot: slot % 2 == 0
    return store


def _mooncake(_: Path) -> BlockStore:
    """With a master of its own, which ends with the store; the only node lends its memory itself."""
    return mooncake_store(BYTES, SLOTS, IDENTITY)


STORES: dict[str, Make] = {
    "host": lambda _: HostStore(memoryview(bytearray(SLOTS * BYTES)), BYTES),
    "disk": _disk,
    "damaging-disk": _damaging,
    "failing": _failing,
    "mooncake": _mooncake,
}
RELIABLE = ("host", "disk", "mooncake")


@pytest.fixture(params=STORES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(name: str, tmp_path: Path) -> Iterator[BlockStore]:
    made = STORES[name](tmp_path)
    yield made
    made.close()


def content(seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(BYTES))


def test_a_store_has_its_slots(store: BlockStore) -> None:
    assert (store.slots, store.block_bytes) == (SLOTS, BYTES)
    assert list(store.found()) == []


def test_nothing_is_read_that_was_not_written(store: BlockStore) -> None:
    (block,) = chain(1)
    assert store.read(0, block.block_hash) is None


def test_a_slot_holds_the_last_block_only(store: BlockStore, name: str) -> None:
    first, second = chain(2)
    store.write(1, first, content(1))
    store.write(1, second, content(2))
    assert store.read(1, first.block_hash) is None
    read = store.read(1, second.block_hash)
    assert read is not None
    assert read == content(2)


def test_what_is_read_is_what_was_written_or_nothing(store: BlockStore, name: str) -> None:
    dice, blocks = random.Random(3), chain(40)
    held: dict[int, tuple[bytes, int]] = {}
    reads = good = 0
    for seed in range(600):
        slot = dice.randrange(SLOTS)
        if dice.random() < 0.5:
            block = dice.choice(blocks)
            store.write(slot, block, content(seed))
            held[slot] = block.block_hash, seed
        elif slot in held:
            block_hash, written = held[slot]
            found = store.read(slot, block_hash)
            reads += 1
            if found is not None:
                good += 1
                assert found == content(written)
            assert store.read(slot, b"?" * 32) is None
    assert good == reads if name in RELIABLE else 0 < good < reads


def test_a_store_can_be_closed_twice(store: BlockStore) -> None:
    store.close()
    store.close()


@pytest.mark.slow
def test_a_store_whose_master_ended_has_nothing() -> None:
    store, (first, second) = mooncake_store(BYTES, SLOTS, IDENTITY), chain(2)
    store.write(1, first, content(1))
    store.end_master()
    with pytest.raises(OSError, match="Mooncake Store took no block"):
        store.write(2, second, content(2))
    # Which it is depends on what the client has noticed.
    with suppress(OSError):
        assert store.read(2, second.block_hash) is None
    with suppress(OSError):
        found = store.read(1, first.block_hash)
        assert found is None or found == content(1)
    store.close()
