"""A store that the workers of one host share: a folder on a local disk, with a file for each block.

A file appears by a rename, whole, and has checksums; so a writer that is killed leaves at worst a temporary file, which
the next one overwrites. Files are spread over `BUCKETS` buckets by their hashes. Whoever holds a bucket's lock is its
owner for the moment: it alone writes there, evicts, and counts, so that the folder never takes more than its bytes.
Readers take no lock: a file that is evicted while it is read stays readable to them. Nothing is synced, as in
`disk_store.py`. The folder must be its user's alone, since checksums detect damage, not malice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from engine.tiers.stores.disk_store import FIELD, checked, require_folder
from engine.tiers.stores.shared_store import SharedStore, shared_id_of
from engine.tiers.tier_index import TierBlock
from splitserve.errors import ConfigError

BUCKETS = 256
BYTES_FIELD = "engine.kv_disk_tier_bytes"
_MAGIC = b"ssshare1"
_HEADER = struct.Struct("<8s32s32sIQQ")
"""Magic, identity, hash of the block, blocks before it, checksum of its bytes, and the checksum of all of these."""
_COUNT = struct.Struct("<QQ")
"""In a bucket's lock: bytes of its blocks, and the checksum of that. Empty while they change."""
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{64}")
_NEW, _LOCK = ".new", ".lock"
_LOCK_PATIENCE_S, _LOCK_LOOK_S = 0.1, 0.005
_CLEARED = 8
"""A full bucket evicts until one in so many of its bytes is free."""
_DEPTH_NS = 10**7
"""A block counts as used so much earlier than the one before it: it is of no use without that, so it goes first."""
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def shared_folder_block_bytes(block_bytes: int) -> int:
    """Bytes of a block's file."""
    return _HEADER.size + block_bytes


class SharedFolder(SharedStore):
    """Blocks in the files of a folder, at most `num_bytes` of them, those of all models together."""

    def __init__(self, folder: Path, identity: bytes, block_bytes: int, num_bytes: int) -> None:
        """`identity`: 32 bytes that say what the bytes of a block mean. Raises OSError; see `open_shared_folder`."""
        self.block_bytes = block_bytes
        self.slots = num_bytes // shared_folder_block_bytes(block_bytes)
        self._folder, self._identity = folder, identity
        self._bucket_bytes = num_bytes // BUCKETS
        self._counted: set[int] = set()
        """Buckets whose count this process has checked: what a power failure left may be wrong."""
        facts = os.stat(folder)
        host = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        self.shared_id = shared_id_of(host, b"%d/%d" % (facts.st_dev, facts.st_ino), identity)

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """See `BlockStore`. A bucket that another process keeps locked is an OSError, too."""
        path, bucket = self._path(block.block_hash), block.block_hash[0]
        if _is_there(path, block.depth):
            return
        size = shared_folder_block_bytes(self.block_bytes)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._owned(path.parent) as lock:
            if _is_there(path, block.depth):  # another worker was first
                return
            used = self._with_room(path.parent, bucket, _count_of(lock), size)
            os.ftruncate(lock, 0)
            self._create(path, block, content)
            os.pwrite(lock, checked(_COUNT, used + size), 0)

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """See `BlockStore`. Removes a file that is damaged."""
        path = self._path(block_hash)
        try:
            descriptor = os.open(path, _READ_FLAGS)
        except FileNotFoundError:
            return None
        try:
            raw = os.pread(descriptor, shared_folder_block_bytes(self.block_bytes) + 1, 0)
            content, depth = memoryview(raw)[_HEADER.size :], _depth_of(raw)
            if raw[: _HEADER.size] == self._header(block_hash, depth, content):
                _set_used(descriptor, depth)
                return content
        finally:
            os.close(descriptor)
        with suppress(OSError):  # counted until the bucket is full
            path.unlink()
        return None

    def held(self, hashes: Sequence[bytes]) -> int:
        """See `SharedStore`."""
        for count, block_hash in enumerate(hashes):
            try:
                os.stat(self._path(block_hash), follow_symlinks=False)
            except FileNotFoundError:
                return count
        return len(hashes)

    def close(self) -> None:
        """See `BlockStore`."""

    def _path(self, block_hash: bytes) -> Path:
        name = f"{self._identity[:16].hex()}-{block_hash.hex()}"
        return self._folder / f"{block_hash[0]:02x}" / name

    def _header(self, block_hash: bytes, depth: int, content: memoryview) -> bytes:
        checksum = xxhash.xxh3_64_intdigest(content)
        return checked(_HEADER, _MAGIC, self._identity, block_hash, depth, checksum)

    @contextmanager
    def _owned(self, bucket: Path) -> Iterator[int]:
        """Owns a bucket; its lock's descriptor. Raises OSError if another process does for long: it may be stopped."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(bucket / _LOCK, flags, 0o600)
        try:
            _lock(lock)
            yield lock
        finally:
            os.close(lock)

    def _with_room(self, folder: Path, bucket: int, used: int | None, size: int) -> int:
        """Evicts what was used least recently until one more block fits; the bytes that are left."""
        if used is not None and used + size <= self._bucket_bytes and bucket in self._counted:
            return used
        files = sorted(_files_of(folder))
        used = sum(file_bytes for _, file_bytes, _ in files)
        most = self._bucket_bytes - size
        if used > most:
            most = max(0, most - self._bucket_bytes // _CLEARED)
        for _, file_bytes, path in files:
            if used <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            used -= file_bytes
        self._counted.add(bucket)
        return used

    def _create(self, path: Path, block: TierBlock, content: memoryview) -> None:
        new = path.parent / _NEW
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(new, flags, 0o600)
        try:
            for part in (self._header(block.block_hash, block.depth, content), content):
                left = memoryview(part)
                while left:
                    left = left[os.write(descriptor, left) :]
            _set_used(descriptor, block.depth)
            os.rename(new, path)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            raise
        finally:
            os.close(descriptor)


def open_shared_folder(folder: Path, identity: bytes, block_bytes: int, num_bytes: int) -> SharedFolder:
    """Opens the folder `shared` of a folder, which is made if it is missing.

    Raises ConfigError if it cannot be used, is not this user's alone, or `num_bytes` are too few.
    """
    least = BUCKETS * shared_folder_block_bytes(block_bytes)
    if num_bytes < least:
        message = (
            f"{BYTES_FIELD}: must be at least {least} to be shared, {BUCKETS} KV blocks, not {num_bytes}"
        )
        raise ConfigError(message, field=BYTES_FIELD)
    shared = folder / "shared"
    require_folder(shared)
    try:
        facts = shared.lstat()
        alone = facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISDIR(facts.st_mode) or not alone:
            raise ConfigError(f"{FIELD}: {shared} is not a folder of this user alone", field=FIELD)
        return SharedFolder(shared, identity, block_bytes, num_bytes)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {shared}: {error.strerror}", field=FIELD) from error


def _files_of(bucket: Path) -> Iterator[tuple[int, int, str]]:
    """When each block of a bucket was used last, its bytes, and its path."""
    with os.scandir(bucket) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # a reader has removed a damaged one
                    facts = entry.stat(follow_symlinks=False)
                    yield facts.st_mtime_ns, facts.st_size, entry.path


def _lock(descriptor: int) -> None:
    until_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > until_s:
                raise
        time.sleep(_LOCK_LOOK_S)


def _count_of(lock: int) -> int | None:
    """Bytes of a bucket's blocks; None if its last owner did not come to write them."""
    raw = os.pread(lock, _COUNT.size + 1, 0)
    if len(raw) != _COUNT.size:
        return None
    used = int(_COUNT.unpack(raw)[0])
    return used if raw == checked(_COUNT, used) else None


def _depth_of(raw: bytes) -> int:
    return int(_HEADER.unpack_from(raw)[3]) if len(raw) >= _HEADER.size else 0


def _is_there(path: Path, depth: int) -> bool:
    """Whether a block has a file; then that counts as a use of it."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return False
    try:
        _set_used(descriptor, depth)
    finally:
        os.close(descriptor)
    return True


def _set_used(descriptor: int, depth: int) -> None:
    used_ns = max(0, time.time_ns() - depth * _DEPTH_NS)
    os.utime(descriptor, ns=(used_ns, used_ns))
