"""Slots of workers that share a host: who rests, whose cores are borrowed, and files that cannot be used."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backends.cpu import core_exchange
from engine.backends.cpu.core_exchange import FILE_BYTES, MAX_SLOTS, NOTHING, SLOT_BYTES, CoreExchange
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


def test_cores_are_lent_while_their_owner_rests(make: Make) -> None:
    mine, other = make(0), make(1, 2)
    assert mine.borrow() == NOTHING
    other.rest()
    borrowed = mine.borrow()
    assert borrowed.cores == (1, 2)
    (address,) = borrowed.addresses
    assert byte_at(address) == 1
    other.work()
    assert byte_at(address) == 0
    mine.give_back(borrowed)
    assert mine.borrow() == NOTHING


def test_nobody_borrows_what_is_borrowed_or_its_own(make: Make) -> None:
    first, second, resting = make(0), make(1), make(2)
    resting.rest()
    first.rest()
    borrowed = first.borrow()
    assert borrowed.cores == (2,)
    other = second.borrow()
    assert other.cores == (0,)
    second.give_back(other)
    first.give_back(borrowed)
    first.work()
    assert second.borrow().cores == (2,)


def test_cores_that_are_not_apart_are_not_lent(make: Make) -> None:
    mine, twin, half = make(0, 1), make(0, 1), make(1, 2)
    twin.rest()
    half.rest()
    assert mine.borrow() == NOTHING


def test_a_worker_that_ends_gives_up_slot_and_loan(make: Make, path: Path) -> None:
    mine, resting = make(0), make(2)
    resting.rest()
    ended = CoreExchange(path, (1,))
    assert ended.borrow().cores == (2,)
    assert mine.borrow() == NOTHING
    ended.rest()
    ended.close()
    borrowed = mine.borrow()
    assert borrowed.cores == (2,)
    mine.give_back(borrowed)
    # The next one has its slot, and does not rest.
    make(5)
    assert mine.borrow().cores == (2,)


def test_nonsense_in_a_slot_lends_nothing(make: Make, path: Path) -> None:
    mine = make(0)
    for cores in (b"\x01\x00\xff\xff", b"\xff\xff", b"\x00\x00\x01\x00", b"\x02\x00\x03\x00\x03\x00"):
        with path.open("r+b") as file:
            file.seek(7 * SLOT_BYTES)
            file.write(b"\x01\0\0\0" + cores)
        assert mine.borrow() == NOTHING, cores


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
