"""The rules that stores keep which workers share: what one has written all read, or nothing."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engine.tiers.stores.mooncake_store import open_mooncake_store
from engine.tiers.stores.shared_folder import BUCKETS, open_shared_folder, shared_folder_block_bytes
from engine.tiers.stores.shared_store import SharedStore
from tests.support.tiers.mooncake_rig import mooncake_store
from tests.support.tiers.shared_rig import FakeMooncake
from tests.support.tiers.tiers_rig import chain, hashes_of

pytestmark = pytest.mark.slow

BYTES, SLOTS = 512, 16 * BUCKETS
IDENTITY, OTHER = bytes(32), bytes([7] * 32)


class Shared:
    """A store and its clients, and what happens to it behind their backs."""

    def __init__(
        self,
        client: Callable[[bytes], SharedStore],
        change: Callable[[SharedStore, bytes, Callable[[bytes], bytes | None]], None] | None,
    ) -> None:
        self._client, self.change = client, change
        self.opened: list[SharedStore] = []

    def client(self, identity: bytes = IDENTITY) -> SharedStore:
        self.opened.append(self._client(identity))
        return self.opened[-1]


def _folder(path: Path) -> Shared:
    def change(store: SharedStore, block_hash: bytes, to: Callable[[bytes], bytes | None]) -> None:
        (file,) = path.glob(f"shared/*/*{block_hash.hex()}")
        if (content := to(file.read_bytes())) is None:
            file.unlink()
        else:
            file.write_bytes(content)

    most = SLOTS * shared_folder_block_bytes(BYTES)
    return Shared(lambda identity: open_shared_folder(path, identity, BYTES, most), change)


def _fake(_: Path) -> Shared:
    fake = FakeMooncake()

    def change(store: SharedStore, block_hash: bytes, to: Callable[[bytes], bytes | None]) -> None:
        (key,) = (key for key in fake.objects if key.endswith(block_hash.hex()))
        if (content := to(fake.objects.pop(key))) is not None:
            fake.objects[key] = content

    return Shared(lambda identity: fake.store(BYTES, SLOTS, identity), change)


def _mooncake(_: Path) -> Shared:
    """A real one; skipped without its package."""
    node = mooncake_store(BYTES, 1, IDENTITY)

    def client(identity: bytes) -> SharedStore:
        opened = open_mooncake_store(node.address, BYTES, SLOTS, identity, 0, "127.0.0.1", shared=True)
        assert isinstance(opened, SharedStore)
        return opened

    shared = Shared(client, None)
    shared.opened.append(node)  # type: ignore[arg-type]  # closed last
    return shared


STORES = {"folder": _folder, "fake-mooncake": _fake, "mooncake": _mooncake}


@pytest.fixture(params=STORES)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    made = STORES[request.param](tmp_path)
    yield made
    for store in reversed(made.opened):
        store.close()


@pytest.fixture(params=("folder", "fake-mooncake"))
def changeable(request: pytest.FixtureRequest, tmp_path: Path) -> Shared:
    """Those whose blocks can be changed from outside; neither has anything to close."""
    return STORES[request.param](tmp_path)


def content(seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(BYTES))


def test_what_one_writes_all_read(shared: Shared) -> None:
    one, other = shared.client(), shared.client()
    blocks = chain(5)
    for seed, block in enumerate(blocks[:3]):
        one.write(seed, block, content(seed))
    assert other.held(hashes_of(blocks)) == 3
    assert other.held(hashes_of(blocks[3:])) == 0
    assert other.held([]) == 0
    for seed, block in enumerate(blocks[:3]):
        assert other.read(9, block.block_hash) == content(seed)
    assert other.read(3, blocks[3].block_hash) is None
    assert list(shared.client().found()) == [], "it is asked"
    assert (one.slots, one.block_bytes) == (SLOTS, BYTES)


def test_it_outlives_its_writer(shared: Shared) -> None:
    one, (block,) = shared.client(), chain(1)
    one.write(0, block, content(1))
    one.close()
    one.close()
    assert shared.client().read(0, block.block_hash) == content(1)


def test_another_identity_sees_nothing(shared: Shared) -> None:
    one, other = shared.client(), shared.client(OTHER)
    (block,) = chain(1)
    one.write(0, block, content(1))
    assert other.held([block.block_hash]) == 0
    assert other.read(0, block.block_hash) is None
    other.write(0, block, content(2))
    assert one.read(0, block.block_hash) == content(1)
    assert one.shared_id == shared.client().shared_id != other.shared_id


def test_a_block_that_goes_after_the_look_up_is_missing(changeable: Shared) -> None:
    one, other = changeable.client(), changeable.client()
    (block,) = chain(1)
    one.write(0, block, content(1))
    assert other.held([block.block_hash]) == 1
    assert changeable.change is not None
    changeable.change(one, block.block_hash, lambda _: None)
    assert other.read(0, block.block_hash) is None
    other.write(0, block, content(1))
    assert one.read(0, block.block_hash) == content(1)


@pytest.mark.parametrize(
    "to",
    [
        lambda held: held[:-1],
        lambda held: held[:20],
        lambda held: b"",
        lambda held: held + b"?",
        lambda held: held[:-9] + b"?" * 9,
        lambda held: b"?" + held[1:],
        lambda held: b"?" * len(held),
    ],
)
def test_what_is_torn_or_changed_is_missing_until_it_is_written_again(
    changeable: Shared, to: Callable[[bytes], bytes | None]
) -> None:
    one, other = changeable.client(), changeable.client()
    (block,) = chain(1)
    one.write(0, block, content(1))
    assert changeable.change is not None
    changeable.change(one, block.block_hash, to)
    assert other.read(0, block.block_hash) is None
    other.write(0, block, content(1))
    assert one.read(0, block.block_hash) == content(1)


def test_a_block_of_another_name_is_missing(changeable: Shared) -> None:
    one, (first, second) = changeable.client(), chain(2)
    one.write(0, first, content(1))
    one.write(0, second, content(2))
    taken: list[bytes] = []
    assert changeable.change is not None
    changeable.change(one, first.block_hash, lambda held: taken.append(held) or held)  # type: ignore[func-returns-value]
    changeable.change(one, second.block_hash, lambda _: taken[0])
    assert one.read(0, second.block_hash) is None


@pytest.mark.timeout(60)
def test_writers_of_one_block_leave_one_whole(shared: Shared) -> None:
    """Two workers that have computed the same block have the same bytes at best, nearly the same at worst."""
    blocks, written = chain(6), {bytes(content(seed)) for seed in (1, 2)}
    failures: list[BaseException] = []

    def write(client: SharedStore, seed: int) -> None:
        try:
            for _ in range(20):
                for block in blocks:
                    with suppress(OSError):  # while the other one writes it
                        client.write(0, block, content(seed))
                        found = client.read(0, block.block_hash)
                        assert found is None or bytes(found) in written
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(shared.client(), seed)) for seed in (1, 2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    reader = shared.client()
    assert reader.held(hashes_of(blocks)) == len(blocks)
    assert all(bytes(reader.read(0, each.block_hash) or b"") in written for each in blocks)


def test_a_store_that_fails_says_so() -> None:
    fake = FakeMooncake()
    store, (block,) = fake.store(BYTES, SLOTS), chain(1)
    fake.fails = True
    with pytest.raises(OSError, match="did not say what it has"):
        store.held([block.block_hash])
    with pytest.raises(OSError, match="took no block"):
        store.write(0, block, content(1))
    with pytest.raises(OSError, match="gave no block"):
        store.read(0, block.block_hash)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do all")
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    store, (block,) = _folder(tmp_path).client(), chain(1)
    store.write(0, block, content(1))
    (tmp_path / "shared" / "00").chmod(0)
    try:
        with pytest.raises(PermissionError):
            store.held([block.block_hash])
    finally:
        (tmp_path / "shared" / "00").chmod(0o700)
