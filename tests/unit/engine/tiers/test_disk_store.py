"""The file of a disk tier: what it keeps across restarts, crashes, damage, and other programs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.tiers.stores import disk_store
from engine.tiers.stores.disk_store import DiskStore, open_disk_store
from engine.tiers.tier_index import TierBlock
from splitserve.errors import ConfigError
from tests.support.tiers.tiers_rig import chain, damage, disk_bytes

BYTES, SLOTS = 1000, 5
ONE, OTHER = b"1" * 32, b"2" * 32
ROOT = Path(__file__).parents[4]


def opened(folder: Path, identity: bytes = ONE, slots: int = SLOTS) -> DiskStore:
    return open_disk_store(folder, identity, BYTES, disk_bytes(slots, BYTES))


def content(number: int) -> memoryview:
    return memoryview(bytes([number]) * BYTES)


def filled(folder: Path, blocks: list[TierBlock]) -> Path:
    """The file of a store that was closed with these blocks in its first slots."""
    store = opened(folder)
    for slot, block in enumerate(blocks):
        store.write(slot, block, content(slot))
    store.close()
    return folder / "blocks-0.kv"


def read(store: DiskStore, blocks: list[TierBlock]) -> list[bool]:
    found = [store.read(slot, block.block_hash) for slot, block in enumerate(blocks)]
    assert all(each is None or each == content(slot) for slot, each in enumerate(found))
    return [each is not None for each in found]


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    blocks = chain(3)
    filled(tmp_path, blocks)
    store = opened(tmp_path)
    assert list(store.found()) == list(enumerate(blocks))
    assert read(store, blocks) == [True] * 3


def test_the_file_is_bounded_and_its_users_alone(tmp_path: Path) -> None:
    path = filled(tmp_path / "new", chain(SLOTS))
    assert path.stat().st_size <= disk_bytes(SLOTS, BYTES)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("identity", "slots"), [(OTHER, SLOTS), (ONE, SLOTS - 1)])
def test_what_another_model_or_size_left_is_discarded(tmp_path: Path, identity: bytes, slots: int) -> None:
    blocks = chain(3)
    filled(tmp_path, blocks)
    store = opened(tmp_path, identity, slots)
    assert list(store.found()) == []
    assert read(store, blocks) == [False] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["blocks-0.kv"]


def test_each_process_has_a_file_of_its_own_and_finds_it_again(tmp_path: Path) -> None:
    filled(tmp_path, chain(2))
    first, second = opened(tmp_path), opened(tmp_path, OTHER)
    assert len(first.found()) == 2
    second.write(0, chain(1)[0], content(0))
    first.close()
    second.close()
    assert len(opened(tmp_path, OTHER).found()) == 1
    assert len(opened(tmp_path).found()) == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.8, 0.999])
def test_a_truncated_file_loses_blocks_at_most(tmp_path: Path, share: float) -> None:
    blocks = chain(SLOTS)
    path = filled(tmp_path, blocks)
    os.truncate(path, int(path.stat().st_size * share))
    store = opened(tmp_path)
    assert not all(read(store, blocks))
    store.write(0, blocks[0], content(0))
    assert read(store, blocks)[0]


def test_garbage_is_a_new_file(tmp_path: Path) -> None:
    path = filled(tmp_path, chain(SLOTS))
    path.write_bytes(os.urandom(path.stat().st_size))
    assert list(opened(tmp_path).found()) == []


def test_damaged_blocks_and_entries_are_missed(tmp_path: Path) -> None:
    blocks = chain(SLOTS)
    path = filled(tmp_path, blocks)
    with path.open("r+b") as file:
        file.seek(4096 + 88 * 1 + 5)
        file.write(b"!!")
    store = opened(tmp_path)
    damage(store, 3)
    assert [slot for slot, _ in store.found()] == [0, 2, 3, 4]
    assert read(store, blocks) == [True, False, True, False, True]


def test_a_full_disk_is_an_error_and_the_slot_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block, other), pwrite, left = chain(2), os.pwrite, [BYTES // 2]

    def full(file: int, data: memoryview, at: int) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data[: left.pop()], at)

    store = opened(tmp_path)
    store.write(0, block, content(1))
    monkeypatch.setattr(disk_store.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        store.write(0, other, content(2))
    monkeypatch.undo()
    assert store.read(0, other.block_hash) is None
    assert store.read(0, block.block_hash) is None
    store.close()
    store = opened(tmp_path)
    assert store.read(0, block.block_hash) is None


WRITER = """
import sys
from pathlib import Path
from engine.tiers.stores.disk_store import open_disk_store
from engine.tiers.tier_index import TierBlock
identity, size, num_bytes = sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
store, number = open_disk_store(Path(sys.argv[1]), identity, size, num_bytes), 0
print("writing", flush=True)
while True:
    number = (number + 1) % 256
    for slot in range(store.slots):
        store.write(slot, TierBlock(bytes([slot]) * 32, None, 0), memoryview(bytes([number]) * size))
"""


def test_a_kill_while_writing_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    arguments = [str(tmp_path), ONE.decode(), str(BYTES), str(disk_bytes(SLOTS, BYTES))]
    command = [sys.executable, "-c", WRITER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    store = opened(tmp_path)  # the lock ended with its process
    for slot in range(SLOTS):
        found = store.read(slot, bytes([slot]) * 32)
        assert found is None or len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["blocks-0.kv"]


def test_folders_that_cannot_be_used_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made") as caught:
        opened(tmp_path / "file")
    assert caught.value.field == "engine.kv_disk_tier_path"
    with pytest.raises(ConfigError, match="hold no KV block") as caught:
        open_disk_store(tmp_path, ONE, BYTES, 5000)
    assert caught.value.field == "engine.kv_disk_tier_bytes"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "blocks-0.kv").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="taken"):
        opened(tmp_path / "taken")


def test_a_folder_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the system's answer is given here.
    monkeypatch.setattr(disk_store.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="not writable"):
        opened(tmp_path)


def test_files_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MAX_FILES", 1)
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match="other processes use all"):
        opened(tmp_path)
    first.close()
    opened(tmp_path)
