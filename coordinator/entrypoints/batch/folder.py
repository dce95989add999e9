"""The folder of files and batches, which one coordinator has at a time.

    lock                  held while the coordinator runs
    files/ID.jsonl        the content of a file, or results of a batch that runs
    files/ID.json         its record, written last; content without one belongs to nothing or to an unfinished batch
    batches/ID.json       a batch

Records are replaced atomically and reach the disk before anybody hears of them. Results are appended line by line and
reach the disk with the first result after SYNC_S, or at the end of their batch. A batch that goes on after a restart
cuts what is torn and runs what has no result, so that each request has one result.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError
from typing_extensions import ParamSpec

from coordinator.entrypoints.batch.lines import InputCheck, RequestLine, number_of, parsed_line
from coordinator.entrypoints.batch.records import (
    FILE_PREFIX,
    FOLLOWING,
    Batch,
    Purpose,
    Status,
    StoredFile,
    new_id,
)
from splitserve.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.logs import log_event
from splitserve.runtime.call_thread import CallThread

MAX_FILE_BYTES = 200 * 2**20
"""Largest file of a client, as with OpenAI."""
MAX_FILES, TENANT_BYTES = 1000, 8 * 2**30
"""Most files of a tenant, and their bytes; results of running batches and files that are being sent count."""
MAX_UPLOADS = 8
"""Most files that a tenant sends at a time."""
MAX_BATCHES, MAX_UNFINISHED, MAX_ALL_UNFINISHED = 1000, 32, 256
"""Batches of a tenant, beyond which its oldest ended one is forgotten; unfinished ones of a tenant, and of all."""
LEAST_FREE_BYTES = 64 * 2**20
"""Nothing is written while the disk has less room."""
ROOM_STEP_BYTES = 4 * 2**20
"""Bytes between two looks at the room while a file is written."""
SYNC_S = 1.0
CHECKED_BYTES = 2**20
"""About how much of an input file is checked at a time."""
RETRY_S = 5.0
_RECORD = re.compile(r"(file-|batch_)[0-9a-f]{32}")
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", StoredFile, Batch)


@dataclass(slots=True)
class InputReading:
    """How far a batch has come in its input file."""

    done: bytearray
    """1 for each line that has a result, by its number."""
    number: int = 0
    offset: int = 0
    """The last line that was read, and the bytes up to its end."""
    again: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers and offsets of lines that were read and are to be read again."""


@dataclass(slots=True)
class FileUpload:
    """A file that is being sent."""

    tenant: str
    file_id: str
    content: FileIO
    has_room_for: int = 0
    """Bytes for which there was room."""


class BatchFolder:
    """Files and batches of all tenants. Its methods block: call them by `run`, on a thread of their own."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the folder cannot be used, or another coordinator uses it."""
        self._path, self._files_at, self._batches_at = path, path / "files", path / "batches"
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Bytes of files, uploads and results, by tenant and id."""
        self._uploads: Counter[str] = Counter()
        """Of each tenant, in progress."""
        self._synced_s: dict[str, float] = {}
        self._thread = CallThread("batch-folder")
        try:
            for folder in (path, self._files_at, self._batches_at):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError:
            message = f"batch_folder: {path} is in use by another coordinator"
            raise ConfigError(message, field="batch_folder") from None
        except OSError as error:
            message = f"batch_folder: cannot use {path}: {error.strerror or error}"
            raise ConfigError(message, field="batch_folder") from None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, on the folder's thread. An OSError becomes UnavailableError (BATCH_FOLDER_FAILED)."""
        try:
            return await self._thread.call(partial(work, *args, **kwargs))
        except OSError as error:
            message = f"batch_folder: {error.strerror or error}"
            raise UnavailableError(
                message, reason="BATCH_FOLDER_FAILED", field="batch_folder", retry_after_s=RETRY_S
            ) from None

    async def close(self) -> None:
        """Ends the thread and lets another coordinator have the folder."""
        await self._thread.close(RETRY_S)
        os.close(self._lock)

    def file(self, tenant: str, file_id: str, field: str = "file_id") -> StoredFile:
        """A file of this tenant. Raises NotFoundError."""
        return _found(self.files, tenant, file_id, field)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """A batch of this tenant. Raises NotFoundError."""
        return _found(self.batches, tenant, batch_id, "batch_id")

    def check_room(self, tenant: str, size: int = 0) -> None:
        """Raises ResourceExhaustedError, or OSError, if the tenant or the disk has no room for so many more bytes."""
        held = sum(self._sizes[tenant].values())
        if held + size > TENANT_BYTES:
            message = f"file: the tenant's files have {held} bytes; at most {TENANT_BYTES} are allowed"
            raise ResourceExhaustedError(message, reason="TENANT_STORAGE", field="file")
        room = os.statvfs(self._path)
        if room.f_bavail * room.f_frsize < LEAST_FREE_BYTES + size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin_upload(self, tenant: str) -> FileUpload:
        """A new file, for `write`, then `end_upload` or `discard`. Raises ResourceExhaustedError, or OSError."""
        if self._uploads[tenant] >= MAX_UPLOADS:
            message = f"file: the tenant sends {MAX_UPLOADS} files already"
            raise ResourceExhaustedError(message, reason="TOO_MANY_UPLOADS", field="file", retry_after_s=1.0)
        if len(self._sizes[tenant]) >= MAX_FILES:
            message = f"file: a tenant may have {MAX_FILES} files; delete some"
            raise ResourceExhaustedError(message, reason="TENANT_STORAGE", field="file")
        self.check_room(tenant)
        file_id = new_id(FILE_PREFIX)
        upload = FileUpload(tenant, file_id, _appendable(self._content(file_id)))
        self._uploads[tenant] += 1
        self._sizes[tenant][file_id] = 0
        return upload

    def write(self, upload: FileUpload, data: bytes) -> None:
        """Appends to the content. Raises InvalidArgumentError if it becomes too long, ResourceExhaustedError or OSError
        if there is no room."""
        size = self._sizes[upload.tenant][upload.file_id]
        if size + len(data) > MAX_FILE_BYTES:
            message = f"file must have at most {MAX_FILE_BYTES} bytes"
            raise InvalidArgumentError(message, reason="FILE_TOO_LARGE", field="file")
        if size + len(data) > upload.has_room_for:
            self.check_room(upload.tenant, ROOM_STEP_BYTES)
            upload.has_room_for = size + ROOM_STEP_BYTES
        self._sizes[upload.tenant][upload.file_id] = _append(upload.content, data, size)

    def end_upload(self, upload: FileUpload, filename: str, now: float) -> StoredFile:
        """Makes a file of an upload. Raises OSError."""
        try:
            return self._register(upload.file_id, upload.tenant, filename, "batch", now)
        finally:
            self.discard(upload)

    def discard(self, upload: FileUpload) -> None:
        """Ends an upload, which is forgotten unless it has become a file."""
        self._uploads[upload.tenant] -= 1
        upload.content.close()
        if upload.file_id not in self.files:
            self._remove_content(upload.tenant, upload.file_id)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file of this tenant. Raises NotFoundError, or InvalidArgumentError while a batch reads it."""
        self.file(tenant, file_id)
        if any(each.input_file_id == file_id and not each.is_over for each in self.batches.values()):
            message = f"file_id: an unfinished batch reads {file_id}; cancel it first"
            raise InvalidArgumentError(message, reason="FILE_IN_USE", field="file_id")
        (self._files_at / f"{file_id}.json").unlink(missing_ok=True)
        del self.files[file_id]
        self._remove_content(tenant, file_id)

    def open_content(self, file: StoredFile) -> BinaryIO:
        """The file's content."""
        return self._content(file.id).open("rb")

    def add_batch(self, batch: Batch) -> None:
        """Adds a new batch. Raises ResourceExhaustedError if there are too many, or OSError."""
        self.file(batch.tenant, batch.input_file_id, "input_file_id")  # it may be gone meanwhile
        unfinished = [other.tenant for other in self.batches.values() if not other.is_over]
        if unfinished.count(batch.tenant) >= MAX_UNFINISHED or len(unfinished) >= MAX_ALL_UNFINISHED:
            message = f"at most {MAX_UNFINISHED} batches of a tenant and {MAX_ALL_UNFINISHED} in all may be unfinished"
            raise ResourceExhaustedError(message, reason="TOO_MANY_BATCHES")
        self.check_room(batch.tenant)
        self._save(self._batches_at, batch)
        self.batches[batch.id] = batch
        over = [each for each in self.batches.values() if each.is_over and each.tenant == batch.tenant]
        for old in over[: max(0, len(over) + unfinished.count(batch.tenant) + 1 - MAX_BATCHES)]:
            (self._batches_at / f"{old.id}.json").unlink(missing_ok=True)
            del self.batches[old.id]

    def set_status(self, batch: Batch, status: Status, now: float, **changes: Any) -> bool:
        """Changes the batch's status, and fields with it. Returns False, and changes nothing, unless `status` may
        follow the present one."""
        if status not in FOLLOWING.get(batch.status, ()):
            return False
        changes |= {"status": status, "times": {**batch.times, f"{status}_at": int(now)}}
        self._save(self._batches_at, batch.model_copy(update=changes))
        for name, value in changes.items():
            setattr(batch, name, value)
        return True

    def check_some(self, batch: Batch, check: InputCheck) -> None:
        """Checks the next lines of a batch's input."""
        until = check.offset + CHECKED_BYTES
        with self._content(batch.input_file_id).open("rb") as content:
            content.seek(check.offset)
            while not check.ended and check.offset < until:
                check.add(content.readline(check.most_bytes + 1))

    def recover(self, batch: Batch) -> InputReading:
        """Reads which lines have results, and cuts a torn end. Counts the results anew."""
        reading = InputReading(bytearray(batch.lines + 1))
        batch.completed = self._recovered(batch, batch.output_file_id, reading.done)
        batch.failed = self._recovered(batch, batch.error_file_id, reading.done)
        return reading

    def next_line(self, batch: Batch, reading: InputReading) -> RequestLine | None:
        """The next line without a result; None: there is none, but lines that were read may run. Raises LineError."""
        with self._content(batch.input_file_id).open("rb") as content:
            if reading.again:
                number, offset = reading.again.popleft()
                content.seek(offset)
                return parsed_line(content.readline(), number, offset, batch.endpoint)
            content.seek(reading.offset)
            while text := content.readline():
                offset = reading.offset
                reading.number, reading.offset = reading.number + 1, offset + len(text)
                if text.strip() and not reading.done[reading.number]:
                    return parsed_line(text, reading.number, offset, batch.endpoint)
        return None

    def append(
        self, batch: Batch, reading: InputReading, number: int, result: bytes, *, failed: bool
    ) -> bool:
        """Appends the result of a line; returns False, and appends nothing, if it has one. Raises
        ResourceExhaustedError or OSError if there is no room."""
        if reading.done[number]:
            return False
        self.check_room(batch.tenant, len(result))
        file_id = batch.error_file_id if failed else batch.output_file_id
        path, sizes, now_s = self._content(file_id), self._sizes[batch.tenant], time.monotonic()
        with _appendable(path) as results:
            sizes[file_id] = _append(results, result, sizes.get(file_id, 0))
        reading.done[number] = 1
        batch.failed += failed
        batch.completed += not failed
        if now_s - self._synced_s.get(file_id, 0.0) > SYNC_S:
            _sync(path)
            self._synced_s[file_id] = now_s
        return True

    def end_batch(self, batch: Batch, status: Status, now: float) -> None:
        """Makes files of the results, and gives the batch its last status. May be repeated. Raises OSError."""
        for file_id, name in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            self._synced_s.pop(file_id, None)
            if file_id not in self.files and self._sizes[batch.tenant].get(file_id):
                self._register(file_id, batch.tenant, f"{batch.id}_{name}.jsonl", "batch_output", now)
        self.set_status(
            batch, status, now, completed=batch.completed, failed=batch.failed, errors=batch.errors
        )

    def _load(self) -> None:
        for file in _records(StoredFile, self._files_at):
            self.files[file.id] = file
            self._sizes[file.tenant][file.id] = file.bytes
        self.batches = {batch.id: batch for batch in _records(Batch, self._batches_at)}
        running = [batch for batch in self.batches.values() if not batch.is_over]
        kept = self.files.keys() | {
            file for each in running for file in (each.output_file_id, each.error_file_id)
        }
        for path in (*self._files_at.iterdir(), *self._batches_at.iterdir()):
            is_left = path.suffix == ".tmp" or (path.suffix == ".jsonl" and path.stem not in kept)
            if is_left and _RECORD.fullmatch(path.stem):  # the folder may have been another program's
                path.unlink()

    def _recovered(self, batch: Batch, file_id: str, done: bytearray) -> int:
        if file_id not in self.files:
            self._sizes[batch.tenant].pop(file_id, None)
        path, good, count = self._content(file_id), 0, 0
        if not path.exists():
            return 0
        with path.open("r+b") as results:
            for result in results:
                number = number_of(result)
                if number is None or number >= len(done) or done[number]:
                    break
                done[number] = 1
                good, count = good + len(result), count + 1
            results.truncate(good)
        self._sizes[batch.tenant][file_id] = good
        return count

    def _register(self, file_id: str, tenant: str, filename: str, purpose: Purpose, now: float) -> StoredFile:
        _sync(self._content(file_id))
        size = self._sizes[tenant][file_id]
        file = StoredFile(
            id=file_id, tenant=tenant, filename=filename, bytes=size, created_at=int(now), purpose=purpose
        )
        self._save(self._files_at, file)
        self.files[file_id] = file
        return file

    def _save(self, folder: Path, record: Batch | StoredFile) -> None:
        path = folder / f"{record.id}.json"
        draft = path.with_suffix(".tmp")
        draft.write_bytes(record.model_dump_json().encode())
        _sync(draft)
        draft.replace(path)
        _sync(folder)

    def _content(self, file_id: str) -> Path:
        return self._files_at / f"{file_id}.jsonl"

    def _remove_content(self, tenant: str, file_id: str) -> None:
        self._content(file_id).unlink(missing_ok=True)
        self._sizes[tenant].pop(file_id, None)


def _found(records: Mapping[str, R], tenant: str, record_id: str, field: str) -> R:
    found = records.get(record_id)
    if found is None or found.tenant != tenant:
        reason = field.upper().replace("_ID", "_NOT_FOUND")
        raise NotFoundError(f"{field}: there is no {record_id[:64]!r}", reason=reason, field=field)
    return found


def _records(kind: type[R], folder: Path) -> list[R]:
    """The records in a folder, the oldest first. A file that is none is logged: the others are still served."""
    found = []
    for path in folder.glob("*.json"):
        try:
            record = kind.model_validate_json(path.read_bytes())
        except ValidationError:
            record = None
        if record is not None and record.id == path.stem:
            found.append(record)
        else:
            log_event("batch_folder.unknown_file", level=logging.WARNING, path=str(path))
    return sorted(found, key=lambda record: (record.created_at, record.id))


def _appendable(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")


def _append(file: FileIO, data: bytes, size: int) -> int:
    """Appends all of `data` to a file of `size` bytes, or nothing; returns the new size. Raises OSError."""
    try:
        if (file.write(data) or 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise
    return size + len(data)


def _sync(path: Path) -> None:
    """Has the disk take a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
