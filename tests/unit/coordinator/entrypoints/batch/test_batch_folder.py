"""The folder of batches: what a restart finds, bounds, a full disk, strangers' files."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.entrypoints.batch import folder as folder_module
from coordinator.entrypoints.batch.folder import BatchFolder
from coordinator.entrypoints.batch.lines import line_id, result_line
from coordinator.entrypoints.batch.records import Batch, StoredFile, new_id
from splitserve.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

NOW = 1_000.0
ENDPOINT = "/v1/completions"
LINES = b"".join(
    b'{"custom_id":"c%d","method":"POST","url":"/v1/completions","body":{}}\n' % number
    for number in range(1, 5)
)


def stored(folder: BatchFolder, content: bytes = LINES, tenant: str = "a") -> StoredFile:
    upload = folder.begin_upload(tenant)
    folder.write(upload, content)
    return folder.end_upload(upload, "in.jsonl", NOW)


def added(folder: BatchFolder, tenant: str = "a", **fields: Any) -> Batch:
    known: dict[str, Any] = {
        "id": new_id("batch_"),
        "tenant": tenant,
        "endpoint": ENDPOINT,
        "input_file_id": stored(folder, tenant=tenant).id,
        "output_file_id": new_id("file-"),
        "error_file_id": new_id("file-"),
        "completion_window": "24h",
        "created_at": int(NOW),
        "expires_at": int(NOW) + 86400,
    }
    batch = Batch(**(known | fields))
    folder.add_batch(batch)
    folder.set_status(batch, "in_progress", NOW, lines=4, total=4)
    return batch


def result(batch: Batch, number: int) -> bytes:
    return result_line(line_id(batch.id, number), f"c{number}", (200, b"{}"))


async def reopened(folder: BatchFolder, path: Path) -> BatchFolder:
    await folder.close()
    return BatchFolder(path)


TORN: list[Callable[[bytes], bytes]] = [
    lambda lines: lines[:-1],
    lambda lines: lines[:-30],
    lambda lines: lines + b'{"id":"bat',
    lambda lines: lines + b"\0" * 80,
    lambda lines: lines + b"\0" * 80 + b"}\n",
    lambda lines: lines + lines,
    lambda lines: lines + b"{}\n",
]


@pytest.mark.parametrize("tear", TORN)
async def test_a_torn_end_is_cut_and_its_line_runs_again(
    tmp_path: Path, tear: Callable[[bytes], bytes]
) -> None:
    folder = BatchFolder(tmp_path)
    batch = added(folder)
    reading = folder.recover(batch)
    for number in (2, 1):
        assert folder.append(batch, reading, number, result(batch, number), failed=False)
    assert not folder.append(batch, reading, 1, result(batch, 1), failed=False)
    assert folder.append(batch, reading, 4, result(batch, 4), failed=True)
    path = tmp_path / "files" / f"{batch.output_file_id}.jsonl"
    path.write_bytes(tear(path.read_bytes()))

    folder = await reopened(folder, tmp_path)
    batch = folder.batches[batch.id]
    reading = folder.recover(batch)
    assert path.read_bytes() in (result(batch, 2), result(batch, 2) + result(batch, 1))
    left = []
    while (line := folder.next_line(batch, reading)) is not None:
        left.append(line.number)
        folder.append(batch, reading, line.number, result(batch, line.number), failed=False)
    assert left in ([3], [1, 3])
    assert (batch.completed, batch.failed) == (3, 1)
    folder.set_status(batch, "finalizing", NOW)
    folder.end_batch(batch, "completed", NOW)
    assert batch.shown()["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    shown = batch.shown()

    folder = await reopened(folder, tmp_path)
    assert folder.batches[batch.id].shown() == shown
    assert {file.purpose for file in folder.files.values()} == {"batch", "batch_output"}
    assert folder.file("a", batch.output_file_id).bytes == path.stat().st_size
    await folder.close()


async def test_one_coordinator_has_the_folder(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    with pytest.raises(ConfigError, match=f"batch_folder: {tmp_path} is in use by another coordinator"):
        BatchFolder(tmp_path)
    await (await reopened(folder, tmp_path)).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="batch_folder: cannot use"):
        BatchFolder(tmp_path / "file")


async def test_a_start_removes_its_own_leftovers_and_nothing_else(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    batch, upload = added(folder), folder.begin_upload("a")
    folder.append(batch, folder.recover(batch), 1, result(batch, 1), failed=False)
    upload.content.close()
    files, batches = tmp_path / "files", tmp_path / "batches"
    (files / "own.jsonl").write_text("{}")
    (files / "own.json").write_text("{}")
    (batches / f"{new_id('batch_')}.json").write_text('{"id": "../../x"}')
    (batches / f"{batch.id}.tmp").write_text("half")

    folder = await reopened(folder, tmp_path)
    assert list(folder.batches) == [batch.id]
    assert list(folder.files) == [batch.input_file_id]
    left = {path.name for path in files.iterdir()}
    assert {"own.jsonl", "own.json", f"{batch.output_file_id}.jsonl"} < left
    assert f"{upload.file_id}.jsonl" not in left
    assert not (batches / f"{batch.id}.tmp").exists()
    await folder.close()


async def test_bounds_of_a_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BatchFolder(tmp_path)
    for name, value in {
        "MAX_FILES": 5,
        "MAX_UNFINISHED": 2,
        "MAX_BATCHES": 3,
        "MAX_FILE_BYTES": 2000,
    }.items():
        monkeypatch.setattr(folder_module, name, value)
    first = added(folder)
    added(folder)
    with pytest.raises(ResourceExhaustedError, match="at most 2 batches") as refused:
        added(folder)
    assert refused.value.reason == "TOO_MANY_BATCHES"
    assert added(folder, "b").tenant == "b"
    with pytest.raises(InvalidArgumentError, match="unfinished batch reads"):
        folder.delete_file("a", first.input_file_id)
    for tenant in ("b", "", "../a"):
        with pytest.raises(NotFoundError):
            folder.delete_file(tenant, first.input_file_id)
    ended = []
    for batch in list(folder.batches.values()):
        folder.set_status(batch, "cancelling", NOW)
        folder.end_batch(batch, "cancelled", NOW)
        assert not folder.set_status(batch, "in_progress", NOW)
        ended.append(batch.id)
    folder.delete_file("a", first.input_file_id)
    added(folder)
    third = added(folder)
    assert [batch.id for batch in folder.batches.values() if batch.tenant == "a"][-1] == third.id
    assert ended[0] not in folder.batches

    upload = folder.begin_upload("a")
    with pytest.raises(InvalidArgumentError, match="at most 2000 bytes"):
        folder.write(upload, b"x" * 2001)
    folder.discard(upload)
    stored(folder)
    with pytest.raises(ResourceExhaustedError, match="5 files"):
        folder.begin_upload("a")
    monkeypatch.setattr(folder_module, "TENANT_BYTES", 100)
    with pytest.raises(ResourceExhaustedError, match="at most 100 are allowed"):
        folder.append(third, folder.recover(third), 1, result(third, 1), failed=False)
    monkeypatch.setattr(folder_module, "MAX_UPLOADS", 1)
    monkeypatch.setattr(folder_module, "TENANT_BYTES", 10**9)
    upload = folder.begin_upload("b")
    with pytest.raises(ResourceExhaustedError) as refused:
        folder.begin_upload("b")
    assert refused.value.reason == "TOO_MANY_UPLOADS"
    folder.discard(upload)
    await folder.close()


async def test_a_full_disk_takes_whole_results_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BatchFolder(tmp_path)
    batch = added(folder)
    reading = folder.recover(batch)
    folder.append(batch, reading, 1, result(batch, 1), failed=False)
    path = tmp_path / "files" / f"{batch.output_file_id}.jsonl"
    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, bounds[1]))  # ends a write half-way
    try:
        with pytest.raises(UnavailableError, match="batch_folder: No space left on device") as failed:
            await folder.run(folder.append, batch, reading, 2, result(batch, 2), failed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)
    assert (failed.value.reason, failed.value.field) == ("BATCH_FOLDER_FAILED", "batch_folder")
    assert path.read_bytes() == result(batch, 1)
    with monkeypatch.context() as full:
        full.setattr(folder_module, "LEAST_FREE_BYTES", 2**62)
        for work in (lambda: folder.check_room("a"), lambda: folder.begin_upload("a")):
            with pytest.raises(OSError, match="No space") as refused:
                work()
            assert refused.value.errno == errno.ENOSPC
    assert folder.append(batch, reading, 2, result(batch, 2), failed=False)
    await folder.close()
