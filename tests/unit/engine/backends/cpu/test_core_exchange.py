"""Slots of workers that share a host: who rests, whose cores are borrowed, and files that cannot be used."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.backends.cpu import core_exchange
from engine.backends.cpu.core_exchange import (
    FILE_BYTES,
    MAX_SLOTS,
    NOTHING,
    SLOT_BYTES,
    USES,
    BorrowedCores,
    CoreExchange,
)
from splitserve.errors import ConfigError

Make = Callable[..., CoreExchange]


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    made: list[CoreExchange] = []

    def claim(*cores: int) -> CoreExchange:
        made.append(CoreExchange(path, cores))
        return made[-1]

    yield claim
    for exchange in made:
        exchange.close()


def byte_at(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def test_a_borrower_sees_when_an_owner_rests(make: Make) -> None:
    mine, other = make(0), make(1, 2)
    borrowed = mine.borrow()
    assert (borrowed.cores, borrowed.counts) == ((1, 2), (2,))
    (address,) = borrowed.addresses
    assert byte_at(address) == 0
    other.rest()
    assert byte_at(address) == 1
    other.work()
    assert byte_at(address) == 0
    mine.give_back(borrowed)


def test_an_owner_sees_that_its_cores_are_wanted_and_used(make: Make) -> None:
    mine, other = make(0), make(1)
    assert other.demand() is None
    borrowed = mine.borrow()
    assert other.demand() == 0
    assert mine.demand() is None
    ctypes.c_uint32.from_address(borrowed.addresses[0] + USES).value += 5
    assert other.demand() == 5
    mine.give_back(borrowed)
    assert other.demand() is None


def test_nobody_borrows_what_is_borrowed_or_its_own(make: Make) -> None:
    first, second, third = make(0), make(1), make(2)
    borrowed = first.borrow()
    assert borrowed.cores == (1, 2)
    other = second.borrow()
    assert other.cores == (0,)
    assert third.borrow() == NOTHING
    second.give_back(other)
    first.give_back(borrowed)
    assert second.borrow().cores == (0, 2)


def test_who_wants_only_what_rests_asks_nobody_to_rest(make: Make) -> None:
    mine, busy, idle = make(0), make(1), make(2)
    assert mine.borrow(wanted=False) == NOTHING
    idle.rest()
    assert mine.borrow(wanted=False) == NOTHING, "they are left to who works and may want them"
    busy.rest()
    borrowed = mine.borrow(wanted=False)
    assert borrowed.cores == (1, 2)
    assert busy.demand() is idle.demand() is None
    # They are taken all the same.
    assert busy.is_lent()
    assert not mine.is_lent()
    assert busy.borrow().cores == (0,)
    mine.give_back(borrowed)
    assert not idle.is_lent()
    wanted = mine.borrow()
    assert wanted.cores == (1, 2)
    assert idle.demand() == 0
    mine.give_back(wanted)
    assert idle.demand() is None


def test_cores_that_are_not_apart_are_not_lent(make: Make) -> None:
    mine, twin, half = make(0, 1), make(0, 1), make(1, 2)
    twin.rest()
    half.rest()
    assert mine.borrow() == NOTHING


def test_a_worker_that_ends_gives_up_slot_and_loan(make: Make, path: Path) -> None:
    mine, other = make(0), make(2)
    ended = CoreExchange(path, (1,))
    assert ended.borrow().cores == (0, 2)
    assert mine.borrow().cores == (1,)
    ended.rest()
    ended.close()
    assert mine.demand() is None
    borrowed = mine.borrow()
    assert borrowed.cores == (2,)
    mine.give_back(borrowed)
    # The next one has its slot, and does not rest.
    make(5)
    borrowed = mine.borrow()
    assert borrowed.cores == (2, 5)
    assert [byte_at(address) for address in borrowed.addresses] == [0, 0]
    other.rest()
    assert [byte_at(address) for address in borrowed.addresses] == [1, 0]


CHILD = """
import os, sys, time
from pathlib import Path
from engine.backends.cpu.core_exchange import CoreExchange
os.cpu_count = lambda: 16
exchange = CoreExchange(Path(sys.argv[1]), (7,))
if sys.argv[2] == "borrows":
    assert exchange.borrow().cores
else:
    exchange.rest()
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def child(path: Path, does: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, path, does], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_borrower_that_is_killed_wants_nothing(make: Make, path: Path) -> None:
    mine = make(0)
    with child(path, "borrows") as borrower:
        assert mine.demand() == 0
        borrower.send_signal(signal.SIGSTOP)  # frozen: it still wants the cores, and uses nothing
        assert mine.demand() == 0
        borrower.kill()
        borrower.wait()
        assert mine.demand() is None


def test_the_cores_of_an_owner_that_was_killed_are_not_borrowed(make: Make, path: Path) -> None:
    mine = make(0)
    with child(path, "rests") as owner:
        owner.send_signal(signal.SIGSTOP)  # frozen while it rests: its cores are free for as long
        borrowed = mine.borrow()
        assert borrowed.cores == (7,)
        mine.give_back(borrowed)
        owner.kill()
        owner.wait()
        assert mine.borrow() == mine.borrow(wanted=False) == NOTHING


def test_nonsense_in_a_slot_lends_nothing(make: Make, path: Path) -> None:
    mine = make(0)
    with path.open("r+b", buffering=0) as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 7, 1, 0))

        def in_slot(cores: bytes) -> BorrowedCores:
            file.seek(7 * SLOT_BYTES)
            file.write(b"\x01\0\0\0" + cores)
            return mine.borrow()

        for cores in (b"\x01\x00\xff\xff", b"\xff\xff", b"\x00\x00\x01\x00", b"\x02\x00\x03\x00\x03\x00"):
            assert in_slot(cores) == NOTHING, cores
        assert in_slot(b"\x01\x00\x05\x00").cores == (5,)


def test_files_that_cannot_be_used_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=rf"has 14 bytes instead of {FILE_BYTES}") as caught:
        CoreExchange(path, (0,))
    assert caught.value.field == "engine.core_exchange"
    assert path.read_bytes() == b"something else"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for wrong in (link, tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="cannot open"):
            CoreExchange(wrong, (0,))


def test_a_full_file_is_refused(make: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_exchange, "MAX_SLOTS", 2)
    make(0)
    make(1)
    with pytest.raises(ConfigError, match="2 workers share"):
        CoreExchange(path, (2,))
    assert MAX_SLOTS == 64
