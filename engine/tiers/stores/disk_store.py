"""A tier's slots in a file on a local disk, which outlives the process.

The file is a header, a table with an entry for each slot, and the slots. Bytes are written before their entry, and
both have checksums, so whatever a crash, a full disk or another program leaves is at worst a slot that holds nothing.
Nothing is synced: after a power failure slots may be lost, never wrong. It is read and written by calls rather than
mapped, because a mapped page that cannot be read would end the process. Checksums detect damage, not malice: whoever
may write to the file can change what prompts are computed from, so it is its user's alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from engine.tiers.stores.block_store import BlockStore
from engine.tiers.tier_index import TierBlock
from splitserve.errors import ConfigError
from splitserve.logs import log_event

FIELD = "engine.kv_disk_tier_path"
MAX_FILES = 256
"""Workers that may share a folder, each with a file of its own."""
_MAGIC = b"sskvtier"
_VERSION = 1
_HEADER = struct.Struct("<8sIQQ32sQ")
"""Magic, version, bytes of a block, slots, identity, and the checksum of all of these."""
_ENTRY = struct.Struct("<32s32sIIQQ")
"""Hash, parent, depth, whether there is a parent, checksum of the block, checksum of all of these."""
_PAGE = 4096
_HASH_BYTES = 32


def slots_within(num_bytes: int, block_bytes: int) -> int:
    """Slots of a file of at most `num_bytes`."""
    return max(0, (num_bytes - 2 * _PAGE) // (block_bytes + _ENTRY.size))


class DiskStore(BlockStore):
    """Slots in a file that this process has locked. `identity` (32 bytes) says what the bytes of a block mean."""

    def __init__(self, descriptor: int, identity: bytes, block_bytes: int, slots: int) -> None:
        """Takes the open file over; `open_disk_store` finds it. What another identity left there is discarded."""
        self.block_bytes, self.slots = block_bytes, slots
        self._file = descriptor
        self._start = -(-(_PAGE + slots * _ENTRY.size) // _PAGE) * _PAGE
        self._checksums: dict[int, tuple[bytes, int]] = {}
        self._found: list[tuple[int, TierBlock]] = []
        header = _header(identity, block_bytes, slots)
        size = self._start + slots * block_bytes
        if _read_header(descriptor) == header:
            os.ftruncate(
                descriptor, size
            )  # a file that lost its end has slots of zeros now, which match nothing
            self._found = list(self._read_table())
            return
        if os.fstat(descriptor).st_size:
            log_event("kv_tier.discarded", why="written for another model, layout, size or version")
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)  # sparse: takes no room until it is written
        self._write_all(header, 0)

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """See `BlockStore`."""
        self._checksums.pop(slot, None)
        checksum = xxhash.xxh3_64_intdigest(content)
        self._write_all(content, self._start + slot * self.block_bytes)
        self._write_all(_entry(block, checksum), _PAGE + slot * _ENTRY.size)
        self._checksums[slot] = block.block_hash, checksum

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """See `BlockStore`."""
        held = self._checksums.get(slot)
        if held is None or held[0] != block_hash:
            return None
        content = os.pread(self._file, self.block_bytes, self._start + slot * self.block_bytes)
        if len(content) != self.block_bytes or xxhash.xxh3_64_intdigest(content) != held[1]:
            return None
        return memoryview(content)

    def found(self) -> Sequence[tuple[int, TierBlock]]:
        """See `BlockStore`."""
        return self._found

    def close(self) -> None:
        """See `BlockStore`. Ends the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read_table(self) -> Iterator[tuple[int, TierBlock]]:
        table = os.pread(self._file, self.slots * _ENTRY.size, _PAGE)
        for slot in range(len(table) // _ENTRY.size):
            raw = table[slot * _ENTRY.size : (slot + 1) * _ENTRY.size]
            block_hash, parent, depth, has_parent, checksum, own = _ENTRY.unpack(raw)
            if own == xxhash.xxh3_64_intdigest(raw[:-8]):
                self._checksums[slot] = block_hash, checksum
                yield slot, TierBlock(block_hash, parent if has_parent else None, depth)

    def _write_all(self, content: bytes | memoryview, at: int) -> None:
        left = memoryview(content)
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written


def open_disk_store(folder: Path, identity: bytes, block_bytes: int, num_bytes: int) -> DiskStore:
    """Opens and locks a file of `folder`: one of this identity, else one that no process uses, else a new one.

    Raises ConfigError if the folder cannot be used, or `num_bytes` hold no block.
    """
    slots = slots_within(num_bytes, block_bytes)
    if slots < 1:
        message = f"engine.kv_disk_tier_bytes: {num_bytes} bytes hold no KV block of {block_bytes} bytes"
        raise ConfigError(message, field="engine.kv_disk_tier_bytes")
    require_folder(folder)
    try:
        descriptor = _lock_one(folder, _header(identity, block_bytes, slots))
        return DiskStore(descriptor, identity, block_bytes, slots)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {folder}: {error.strerror}", field=FIELD) from error


def require_folder(folder: Path) -> None:
    """Makes the folder, of this user alone. Raises ConfigError if it is not there to be written to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {folder} cannot be made: {error.strerror}", field=FIELD) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{FIELD}: {folder} is not writable", field=FIELD)


def _lock_one(folder: Path, header: bytes) -> int:
    """The open file of a folder that is this process's own now."""
    spare = None
    for number in range(MAX_FILES):
        try:
            descriptor = _open_locked(folder / f"blocks-{number}.kv", create=spare is None)
        except FileNotFoundError:  # files are numbered without gaps, so none of this identity follows
            break
        if descriptor is None:
            continue
        if _read_header(descriptor) == header:
            if spare is not None:
                os.close(spare)
            return descriptor
        if spare is None:
            spare = descriptor
        else:
            os.close(descriptor)
    if spare is None:
        raise ConfigError(f"{FIELD}: other processes use all {MAX_FILES} files of {folder}", field=FIELD)
    return spare


def _open_locked(path: Path, *, create: bool) -> int | None:
    """Opens a file and locks it; None if another process has. Raises ConfigError for what is no file of this user."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(f"{FIELD}: {path} is not a file of this user", field=FIELD)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return descriptor


def _header(identity: bytes, block_bytes: int, slots: int) -> bytes:
    assert len(identity) == _HASH_BYTES
    return checked(_HEADER, _MAGIC, _VERSION, block_bytes, slots, identity)


def _entry(block: TierBlock, checksum: int) -> bytes:
    has_parent = block.parent is not None
    parent = block.parent if block.parent is not None else bytes(_HASH_BYTES)
    return checked(_ENTRY, block.block_hash, parent, block.depth, has_parent, checksum)


def checked(form: struct.Struct, *values: object) -> bytes:
    """Values, packed, the last of which is the checksum (XXH3-64) of the others."""
    packed = form.pack(*values, 0)[:-8]
    return packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))


def _read_header(descriptor: int) -> bytes:
    return os.pread(descriptor, _HEADER.size, 0)
