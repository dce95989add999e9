"""Lends the cores of workers that have nothing to do for a while to their neighbours on one host.

Workers share a file. Each claims a slot of it, and writes there which cores it has and whether it rests. A worker
that computes a chunk of a prompt borrows its neighbours' cores for it, those that rest and those that do not: the
kernels look at the slots before each operation, and use the cores of those that rest at the time. So a neighbour need
only look whether its cores are borrowed to know that a rest would be of use. Locks on ranges of the file say who has
claimed a slot and who has borrowed its cores; the system releases them when their owner ends, so that nothing has to be
cleaned up after a crash.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from splitserve.config.engine import INHERITED_FILES
from splitserve.errors import ConfigError
from splitserve.runtime.byte_locks import is_locked, set_lock

MAX_SLOTS = 64
SLOT_BYTES = 256
"""Of several cache lines: a neighbour that looks at a slot does not slow its owner's other data down."""
MAX_CORES = 62
_FIELD = "engine.core_exchange"
_RESTS = 0
"""Offset of the byte that is 1 while the slot's owner rests."""
_CORES = 4
"""Offset of the number of cores, and of the cores, 16 bits each."""
USES = 192
"""Offset of a counter of 32 bits of what a borrower computes on the cores; in a cache line of its own."""
FILE_BYTES = MAX_SLOTS * SLOT_BYTES
_BORROWED, _WANTED = MAX_SLOTS, 2 * MAX_SLOTS
"""Offsets of the locks of those who compute on a slot's cores, and who would have their owner rest."""


@dataclass(frozen=True, slots=True)
class BorrowedCores:
    """Cores of neighbours, for as long as these rest: `counts` of each. `addresses`: of the bytes that are 1 while they
    do."""

    cores: tuple[int, ...]
    addresses: tuple[int, ...]
    counts: tuple[int, ...]
    slots: tuple[int, ...]


NOTHING = BorrowedCores((), (), (), ())


class CoreExchange:
    """One worker's view of the shared file. Used on one thread."""

    def __init__(self, path: Path, cores: Iterable[int]) -> None:
        """`cores`: this worker's own. Raises ConfigError if the file cannot be used, or all its slots are taken."""
        self._own = tuple(sorted(cores))[:MAX_CORES]
        # The supervisor's file has no name, only links to it.
        how = os.O_RDWR if path.parent == INHERITED_FILES else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            self._file = os.open(path, how | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{_FIELD}: cannot open {path}: {error.strerror}", field=_FIELD) from error
        try:
            self._memory = self._map(path)
            self._address = _address_of(self._memory)
            self._slot = self._claim(path)
        except OSError as error:  # a file system without such locks, or without room
            os.close(self._file)
            raise ConfigError(f"{_FIELD}: cannot use {path}: {error.strerror}", field=_FIELD) from error
        except BaseException:
            os.close(self._file)
            raise
        struct.pack_into(
            f"<{len(self._own) + 1}H", self._memory, self._at(_CORES), len(self._own), *self._own
        )

    def _map(self, path: Path) -> mmap.mmap:
        size = os.fstat(self._file).st_size
        if size not in (0, FILE_BYTES):
            raise ConfigError(f"{_FIELD}: {path} has {size} bytes instead of {FILE_BYTES}", field=_FIELD)
        os.ftruncate(self._file, FILE_BYTES)
        return mmap.mmap(self._file, FILE_BYTES)

    def _claim(self, path: Path) -> int:
        for slot in range(MAX_SLOTS):
            if self._lock(slot):
                self._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
                return slot
        raise ConfigError(f"{_FIELD}: {MAX_SLOTS} workers share {path} already", field=_FIELD)

    def rest(self) -> None:
        """This worker has nothing to do until `work`."""
        self._memory[self._at(_RESTS)] = 1

    def work(self) -> None:
        """This worker wants its cores for itself."""
        self._memory[self._at(_RESTS)] = 0

    def borrow(self, wanted: bool = True) -> BorrowedCores:
        """The cores of all neighbours that live and that nobody else has borrowed; unless they are `wanted`, so that
        their owners may rest between steps, only where all neighbours rest now: another one that works would find them
        taken, though it may want them for a prompt. End it by `give_back`."""
        if not wanted and (1 not in self._memory[_RESTS::SLOT_BYTES] or not self._all_rest()):
            return NOTHING
        cores: list[int] = []
        addresses: list[int] = []
        counts: list[int] = []
        slots: list[int] = []
        taken = {*self._own}
        for slot in range(MAX_SLOTS):
            if slot == self._slot:
                continue
            theirs = self._cores_of(slot)
            # A slot without an owner is what a worker left that was killed: a new one may have its cores.
            if not theirs or not taken.isdisjoint(theirs) or not self._is_locked(slot):
                continue
            if not self._lock(_BORROWED + slot):
                continue
            if wanted:
                self._lock(_WANTED + slot)
            taken.update(theirs)
            cores += theirs
            addresses.append(self._address + slot * SLOT_BYTES + _RESTS)
            counts.append(len(theirs))
            slots.append(slot)
        return (
            BorrowedCores(tuple(cores), tuple(addresses), tuple(counts), tuple(slots)) if slots else NOTHING
        )

    def give_back(self, borrowed: BorrowedCores) -> None:
        """Ends a `borrow`."""
        for slot in borrowed.slots:
            self._set_lock(fcntl.F_UNLCK, _WANTED + slot)
            self._set_lock(fcntl.F_UNLCK, _BORROWED + slot)

    def _all_rest(self) -> bool:
        others = (slot for slot in range(MAX_SLOTS) if slot != self._slot and self._cores_of(slot))
        return all(self._memory[slot * SLOT_BYTES + _RESTS] or not self._is_locked(slot) for slot in others)

    def is_lent(self) -> bool:
        """Whether a neighbour computes on this worker's cores, or will when it rests."""
        return self._is_locked(_BORROWED + self._slot)

    def demand(self) -> int | None:
        """None unless a neighbour wants this worker's cores; then a number that changes while they compute."""
        if not self._is_locked(_WANTED + self._slot):
            return None
        (uses,) = struct.unpack_from("<I", self._memory, self._at(USES))
        return int(uses)

    def close(self) -> None:
        """Gives up the slot."""
        self._memory[self._at(0) : self._at(SLOT_BYTES)] = bytes(SLOT_BYTES)
        self._memory.close()  # it refers to the open file, too, and so to its locks
        os.close(self._file)

    def _at(self, offset: int) -> int:
        return self._slot * SLOT_BYTES + offset

    def _cores_of(self, slot: int) -> Sequence[int]:
        """What a neighbour says it has; nothing if that cannot be."""
        begin = slot * SLOT_BYTES + _CORES
        (count,) = struct.unpack_from("<H", self._memory, begin)
        if not 1 <= count <= MAX_CORES:
            return ()
        cores = struct.unpack_from(f"<{count}H", self._memory, begin + 2)
        return cores if len(set(cores)) == count and max(cores) < (os.cpu_count() or 1) else ()

    def _lock(self, at: int) -> bool:
        """Locks a byte of the file if nobody else has."""
        with suppress(BlockingIOError, PermissionError):
            self._set_lock(fcntl.F_WRLCK, at)
            return True
        return False

    def _is_locked(self, at: int) -> bool:
        """Whether another one has locked a byte of the file."""
        return is_locked(self._file, at)

    def _set_lock(self, kind: int, at: int) -> None:
        """Of the open file, not of the process."""
        set_lock(self._file, kind, at)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
