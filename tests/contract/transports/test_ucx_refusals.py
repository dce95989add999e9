"""The ucx transport in front of a peer that does not keep to the protocol: nothing lands, nobody else suffers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kv_transfer.transports.ucx.binding import Operation, UcxEndpoint, UcxWorker, to_memory
from kv_transfer.transports.ucx.messages import (
    Ack,
    Announce,
    Gone,
    Hello,
    Kind,
    Message,
    Notice,
    Refused,
    Tag,
    decode,
    encode,
    encode_metadata,
)
from kv_transfer.transports.ucx.receiver import MAX_RENEWALS, RENEW_S, UcxInbox
from kv_transfer.transports.ucx.transport import ANSWER_S, UcxTransport
from splitserve.errors import TransferError
from tests.support.transfer.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

BLOCKS, SESSION = 8, 77
SIZE = LAYOUT.block_bytes


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class RawPeer:
    """A peer that sends hand-made protocol messages."""

    def __init__(self, address: bytes, session: int = SESSION) -> None:
        self.worker = UcxWorker()
        self.inbox = UcxInbox(self.worker)
        self.agent_id = str(uuid.uuid4())
        self.session = session
        self.endpoint: UcxEndpoint = self.worker.connect(address)
        self.sent: list[Operation] = []
        self.received: list[Message] = []

    def send(self, message: Message | bytes, kind: Kind = Kind.CALL) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.sent.append(self.endpoint.send(to_memory(data), Tag(kind, self.session).value))

    def hello(self) -> None:
        self.send(Hello(encode_metadata(self.agent_id, self.worker.address)))

    def data(self, write: int, run: int, size: int) -> None:
        tag = Tag(Kind.DATA, self.session, write, run).value
        self.sent.append(self.endpoint.send(np.full(size, 0x55, dtype=np.uint8), tag))

    def poll(self) -> None:
        self.worker.progress()
        self.received += [decode(data) for _, data in self.inbox.collect()]

    def close(self) -> None:
        self.endpoint.close()
        self.inbox.close()
        self.sent.clear()
        self.worker.close()


class Owner:
    """The transport under test."""

    def __init__(self) -> None:
        self.pool = NumpyPool(BLOCKS, fill=0xEE)
        self.transport = UcxTransport()
        self.endpoint = self.transport.register_memory(self.pool.memory)
        self.received: list[tuple[str, bytes]] = []
        self.address = bytes(self.endpoint.metadata[56:])

    @property
    def sessions(self) -> dict[int, Any]:
        """Callers by their session, as the transport keeps them."""
        assert self.transport._receiver is not None
        return self.transport._receiver._callers

    def poll(self) -> None:
        self.received += self.transport.poll().notifications


@pytest.fixture
def owner() -> Iterator[Owner]:
    require_ucx()
    owner = Owner()
    yield owner
    owner.transport.close()


@pytest.fixture
def raw_peer(owner: Owner) -> Iterator[RawPeer]:
    raw_peer = RawPeer(owner.address)
    yield raw_peer
    raw_peer.close()


def settle(condition: Callable[[], bool], *sides: Owner | RawPeer) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "nothing comes of it"
        for side in sides:
            side.poll()


def test_a_message_that_never_arrives_in_full_does_not_keep_the_worker_from_closing(
    raw_peer: RawPeer,
) -> None:
    """UCXX ends a worker only once it has received all that has begun to arrive; its sender is gone here."""
    worker = UcxWorker()
    inbox, sender = UcxInbox(worker), raw_peer.worker.connect(worker.address)
    sender.send(np.zeros(100_000, dtype=np.uint8), 7)
    end = time.monotonic() + PATIENCE_S
    while not worker.probe(0, 0):
        assert time.monotonic() < end, "nothing comes of it"
        raw_peer.worker.progress()
        worker.progress()
    sender.close()
    inbox.close()
    worker.close()


@pytest.mark.parametrize(
    ("runs", "total"),
    [
        (((BLOCKS, 1),), SIZE),
        (((BLOCKS - 1, 2),), 2 * SIZE),
        (((0, 2**32 - 1),), SIZE),
        (((2**32 - 1, 1),), SIZE),
        (((0, 0),), 0),
        (((0, 1),), SIZE - 1),
        (((0, 1), (1, 1)), SIZE),
    ],
)
def test_writes_that_do_not_fit_are_refused(
    owner: Owner, raw_peer: RawPeer, runs: tuple[tuple[int, int], ...], total: int
) -> None:
    raw_peer.hello()
    raw_peer.send(Announce(5, total, runs))
    for run in range(len(runs)):
        raw_peer.data(5, run, SIZE)
    settle(lambda: bool(raw_peer.received), owner, raw_peer)
    (answer,) = raw_peer.received
    assert isinstance(answer, Refused)
    settle(lambda: all(operation.done for operation in raw_peer.sent), owner, raw_peer)
    assert (owner.pool.data == 0xEE).all()
    raw_peer.send(Announce(5, SIZE, ((2, 1),)))  # the number is free again
    raw_peer.data(5, 0, SIZE)
    settle(lambda: len(raw_peer.received) == 2, owner, raw_peer)
    assert raw_peer.received[1] == Ack(5)
    assert (owner.pool.data[2] == 0x55).all()


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1, 64 * SIZE])
def test_a_run_of_another_length_never_lands(owner: Owner, raw_peer: RawPeer, size: int) -> None:
    raw_peer.hello()
    raw_peer.send(Announce(1, SIZE, ((3, 1),)))
    raw_peer.data(1, 0, size)
    settle(lambda: bool(raw_peer.received), owner, raw_peer)
    assert isinstance(raw_peer.received[0], Refused)
    assert (owner.pool.data == 0xEE).all()


@pytest.mark.parametrize("bad", [b"\x63", b"\x02short", encode(Ack(1)), encode(Announce(1, SIZE, ((0, 1),)))])
def test_a_malformed_message_ends_the_session(owner: Owner, raw_peer: RawPeer, bad: bytes) -> None:
    raw_peer.hello()
    raw_peer.send(Announce(1, SIZE, ((0, 1),)))
    raw_peer.send(bad)
    settle(lambda: Gone() in raw_peer.received or not raw_peer.endpoint.alive, owner, raw_peer)
    assert (owner.pool.data == 0xEE).all()


def test_nothing_is_taken_from_a_session_without_a_beginning(owner: Owner, raw_peer: RawPeer) -> None:
    other = RawPeer(owner.address, session=SESSION + 1)
    raw_peer.send(Announce(1, SIZE, ((0, 1),)))
    raw_peer.data(1, 0, SIZE)
    raw_peer.data(9, 9, 64 * SIZE)
    raw_peer.send(Notice(b"hi"))
    raw_peer.send(Hello(b"no metadata"))
    raw_peer.send(b"x" * (2**20 + 1))
    settle(lambda: all(operation.done for operation in raw_peer.sent), owner, raw_peer)
    other.hello()
    other.send(Notice(b"still here"))
    settle(lambda: bool(owner.received), owner, raw_peer, other)
    assert owner.received == [(other.agent_id, b"still here")]
    assert (owner.pool.data == 0xEE).all()
    assert raw_peer.received == []
    other.close()


def broken(worker: UcxWorker, address: bytes) -> UcxEndpoint:
    """A connection that is broken from the first. None is made: one closed at once might break the peer's own."""
    return UcxEndpoint(None, worker)


def test_replies_come_over_another_connection_if_theirs_breaks(
    owner: Owner, raw_peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UcxWorker, "connect", broken)
    raw_peer.hello()
    raw_peer.send(Announce(1, SIZE, ((3, 1),)))
    settle(lambda: bool(owner.sessions), owner, raw_peer)
    monkeypatch.undo()
    raw_peer.data(1, 0, SIZE)
    settle(lambda: bool(raw_peer.received), owner, raw_peer)
    assert raw_peer.received == [Ack(1)]
    assert (owner.pool.data[3] == 0x55).all()


def test_what_a_broken_connection_may_have_lost_is_said_again(owner: Owner, raw_peer: RawPeer) -> None:
    raw_peer.hello()
    for write in range(3):
        raw_peer.send(Announce(write, SIZE, ((write, 1),)))
        raw_peer.data(write, 0, SIZE)
    settle(lambda: len(raw_peer.received) == 3, owner, raw_peer)
    owner.sessions[SESSION].endpoint.close()
    settle(lambda: len(raw_peer.received) == 6, owner, raw_peer)
    assert raw_peer.received == [Ack(0), Ack(1), Ack(2)] * 2
    owner.sessions[SESSION].resent = None
    owner.sessions[SESSION].endpoint.close()
    owner.poll()
    assert not owner.sessions, "more than is kept may be lost"


def test_a_connection_that_breaks_late_is_not_set_up_again(
    owner: Owner, raw_peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX connects as long as the system tries, and the caller's host may have vanished."""
    raw_peer.hello()
    raw_peer.send(Announce(0, SIZE, ((0, 1),)))
    raw_peer.data(0, 0, SIZE)
    settle(lambda: len(raw_peer.received) == 1, owner, raw_peer)
    caller = owner.sessions[SESSION]
    caller.connected_s -= RENEW_S + 1
    monkeypatch.setattr(UcxWorker, "connect", lambda worker, address: pytest.fail("connects"))
    caller.endpoint.close()
    owner.poll()
    assert not owner.sessions


def test_a_caller_that_cannot_be_reached_is_given_up(
    owner: Owner, raw_peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bytes] = []

    def counted(worker: UcxWorker, address: bytes) -> UcxEndpoint:
        tries.append(address)
        return broken(worker, address)

    monkeypatch.setattr(UcxWorker, "connect", counted)
    raw_peer.hello()
    settle(lambda: len(tries) == 1 + MAX_RENEWALS, owner, raw_peer)
    for _ in range(50):
        owner.poll()
    assert len(tries) == 1 + MAX_RENEWALS


def test_writes_to_an_owner_that_never_answers_fail(owner: Owner) -> None:
    clock = Clock()
    writer, pool = UcxTransport(clock), NumpyPool(BLOCKS)
    writer.register_memory(pool.memory)
    writer.connect(owner.endpoint)
    clock.now = 2 * ANSWER_S  # nothing was written yet
    first = writer.write(owner.endpoint.agent_id, [0], [0], b"done")
    clock.now += ANSWER_S - 1
    second = writer.write(owner.endpoint.agent_id, [1], [1], b"done")
    assert writer.poll().writes == []
    clock.now += 1
    writes = writer.poll().writes
    assert [(write.handle, write.in_doubt) for write in writes] == [(first, True), (second, True)]
    assert all("answered nothing for 60 s" in (write.error or "") for write in writes)
    assert writer.connected() == frozenset()
    with pytest.raises(TransferError):
        writer.write(owner.endpoint.agent_id, [0], [0])
    writer.close()


def test_a_fenced_agent_cannot_write_any_more(owner: Owner, raw_peer: RawPeer) -> None:
    owner.transport.refuse(raw_peer.agent_id)
    raw_peer.hello()
    raw_peer.send(Announce(1, SIZE, ((0, 1),)))
    raw_peer.data(1, 0, SIZE)
    settle(lambda: Gone() in raw_peer.received or not raw_peer.endpoint.alive, owner, raw_peer)
    for _ in range(50):
        owner.poll()
    assert (owner.pool.data == 0xEE).all()
