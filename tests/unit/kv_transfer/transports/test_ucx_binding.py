"""Lanes that `ucx` uses, and when it closes connections that nobody needs any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kv_transfer.transports.ucx.binding import PARTING_S, Partings


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Send:
    done: bool = False


@dataclass
class Connection:
    alive: bool = True
    closed: int = 0

    def close(self) -> None:
        self.alive = False
        self.closed += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


def part(partings: Partings, connection: Connection, sends: Any = (), *, for_peer: bool = False) -> None:
    partings.part(connection, sends, for_peer=for_peer)  # type: ignore[arg-type]


def test_a_connection_stays_until_its_messages_have_left(clock: Clock) -> None:
    partings, connection, send = Partings(clock), Connection(), Send()
    part(partings, connection, [send])
    partings.poll()
    assert connection.closed == 0
    send.done = True
    for _ in range(2):
        partings.poll()
    assert connection.closed == 1


def test_messages_that_never_leave_do_not_keep_it(clock: Clock) -> None:
    partings, connection = Partings(clock), Connection()
    part(partings, connection, [Send()])
    clock.now = PARTING_S - 0.1
    partings.poll()
    assert connection.closed == 0
    clock.now = PARTING_S
    partings.poll()
    assert connection.closed == 1


def test_one_that_the_peer_is_to_close_stays_until_it_has(clock: Clock) -> None:
    partings, connection = Partings(clock), Connection()
    part(partings, connection, for_peer=True)
    clock.now = 1000 * PARTING_S
    partings.poll()
    assert connection.closed == 0
    connection.alive = False
    partings.poll()
    assert connection.closed == 1


def test_the_oldest_beyond_the_bound_are_closed(clock: Clock) -> None:
    partings, connections = Partings(clock), [Connection() for _ in range(5)]
    for connection in connections:
        part(partings, connection, for_peer=True)
    partings.poll(max_open=3)
    assert [connection.closed for connection in connections] == [1, 1, 0, 0, 0]
    partings.close()
    assert [connection.closed for connection in connections] == [1, 1, 1, 1, 1]
