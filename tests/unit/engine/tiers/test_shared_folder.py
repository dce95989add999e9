"""The folder that workers of a host share never takes more than its bytes, whoever is killed or stopped."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from pathlib import Path

import pytest

from engine.tiers.stores.shared_folder import (
    BUCKETS,
    SharedFolder,
    open_shared_folder,
    shared_folder_block_bytes,
)
from engine.tiers.tier_index import TierBlock
from splitserve.errors import ConfigError

BYTES = 512
FILE = shared_folder_block_bytes(BYTES)
A_BUCKET = 8
"""Blocks that fit into a bucket."""
MOST = BUCKETS * A_BUCKET * FILE


def opened(folder: Path, most: int = MOST) -> SharedFolder:
    return open_shared_folder(folder, bytes(32), BYTES, most)


def block(number: int, depth: int = 0, bucket: int = 0) -> TierBlock:
    return TierBlock(bytes([bucket]) + number.to_bytes(31, "little"), None, depth)


def content(seed: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(BYTES))


def taken(folder: Path) -> int:
    """Bytes of all blocks, finished or not."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def there(store: SharedFolder, *blocks: TierBlock) -> list[bool]:
    return [store.held([each.block_hash]) == 1 for each in blocks]


def use_at(folder: Path, one: TierBlock, second: int) -> None:
    (path,) = folder.glob(f"shared/*/*{one.block_hash.hex()}")
    os.utime(path, (second, second))


def test_two_workers_stay_within_the_bytes(tmp_path: Path) -> None:
    stores = opened(tmp_path), opened(tmp_path)
    for number in range(10 * A_BUCKET):
        stores[number % 2].write(0, block(number), content(number))
        assert taken(tmp_path) <= A_BUCKET * FILE
    assert stores[0].read(0, block(10 * A_BUCKET - 1).block_hash) == content(10 * A_BUCKET - 1)
    assert stores[0].slots == BUCKETS * A_BUCKET


def test_what_was_used_least_recently_goes_and_children_before_their_parents(tmp_path: Path) -> None:
    store = opened(tmp_path)
    blocks = [block(number, depth=number) for number in range(A_BUCKET)]
    for number, each in enumerate(blocks):
        store.write(0, each, content(number))
    for each in blocks:
        assert store.read(0, each.block_hash) is not None
    store.write(0, block(99), content(99))
    assert there(store, *blocks) == [True] * (A_BUCKET - 2) + [False] * 2
    for each in blocks[:3]:
        use_at(tmp_path, each, 1000)
    store.read(0, blocks[1].block_hash)
    store.write(0, blocks[2], content(2))
    for number in range(100, 102):
        store.write(0, block(number), content(number))
    assert there(store, *blocks[:3]) == [False, True, True], (
        "a read is a use, and so is a write of what is there"
    )


@pytest.mark.parametrize("left", ["count", "nonsense", "nothing"])
def test_a_writer_that_was_killed_is_counted_again(tmp_path: Path, left: str) -> None:
    store = opened(tmp_path)
    for number in range(A_BUCKET - 1):
        store.write(0, block(number), content(number))
    bucket = tmp_path / "shared" / "00"
    (bucket / ".new").write_bytes(b"?" * (FILE // 2))
    if left != "count":
        (bucket / ".lock").write_bytes(b"" if left == "nothing" else b"?" * 16)
    other = opened(tmp_path)
    for number in range(A_BUCKET, 3 * A_BUCKET):
        other.write(0, block(number), content(number))
        assert taken(tmp_path) <= A_BUCKET * FILE
        assert other.read(0, block(number).block_hash) == content(number)


def test_a_bucket_that_is_kept_locked_takes_nothing_and_gives_all(tmp_path: Path) -> None:
    store, (first, second) = opened(tmp_path), (block(1), block(2))
    store.write(0, first, content(1))
    with (tmp_path / "shared" / "00" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            store.write(0, second, content(2))
        store.write(0, first, content(1))
        assert store.read(0, first.block_hash) == content(1)
        store.write(0, block(2, bucket=1), content(2))
    store.write(0, second, content(2))
    assert store.read(0, second.block_hash) == content(2)


def test_a_full_disk_leaves_the_bucket_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    written, calls = os.write, iter(range(100))

    def full(descriptor: int, data: bytes) -> int:
        if next(calls) == 0:
            return written(descriptor, memoryview(data)[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            store.write(0, block(1), content(1))
    assert there(store, block(1)) == [False]
    assert taken(tmp_path) == 0
    store.write(0, block(1), content(1))
    assert store.read(0, block(1).block_hash) == content(1)


@pytest.mark.timeout(60)
def test_writers_of_many_blocks_at_a_time_stay_within_the_bytes(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def write(seed: int) -> None:
        store, dice = opened(tmp_path), random.Random(seed)
        try:
            for _ in range(60):
                number = dice.randrange(3 * A_BUCKET)
                store.write(0, block(number), content(number))
                found = store.read(0, block(number).block_hash)
                assert found is None or found == content(number)
        except BlockingIOError:
            pass  # too busy: a block that is not kept
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert taken(tmp_path) <= A_BUCKET * FILE


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(0, block(0), content(0))
    (tmp_path / "shared" / "00" / "notes.txt").write_text("mine")
    for number in range(3 * A_BUCKET):
        store.write(0, block(number), content(number))
    assert (tmp_path / "shared" / "00" / "notes.txt").read_text() == "mine"


def test_a_link_in_place_of_a_block_is_not_followed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(0, block(0), content(0))
    (path,) = (tmp_path / "shared" / "00").glob("*-*")
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        store.read(0, block(0).block_hash)


def test_bounds_and_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"at least {BUCKETS * FILE} to be shared") as caught:
        opened(tmp_path, BUCKETS * FILE - 1)
    assert caught.value.field == "engine.kv_disk_tier_bytes"
    assert opened(tmp_path, BUCKETS * FILE).slots == BUCKETS
    (tmp_path / "open" / "shared").mkdir(parents=True)
    (tmp_path / "open" / "shared").chmod(0o777)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "shared").symlink_to(tmp_path / "shared")
    for folder in ("open", "link"):
        with pytest.raises(ConfigError, match="not a folder of this user alone") as caught:
            opened(tmp_path / folder)
        assert caught.value.field == "engine.kv_disk_tier_path"


def test_the_least_quota_holds_a_block_a_bucket(tmp_path: Path) -> None:
    store = opened(tmp_path, BUCKETS * FILE)
    for number in range(3):
        store.write(0, block(number), content(number))
        assert there(store, block(number)) == [True]
        assert taken(tmp_path) <= FILE
