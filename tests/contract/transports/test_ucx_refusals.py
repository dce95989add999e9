"""The ucx transport in front of a peer that does not keep to the protocol: nothing lands, nobody else suffers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_transfer.transports.ucx.binding import Operation, UcxEndpoint, UcxWorker, to_memory
from kv_transfer.transports.ucx.inbox import UcxInbox
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
from kv_transfer.transports.ucx.transport import UcxTransport
from tests.support.engine.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

BLOCKS, SESSION = 8, 77
SIZE = LAYOUT.block_bytes


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


def test_a_fenced_agent_cannot_write_any_more(owner: Owner, raw_peer: RawPeer) -> None:
    owner.transport.refuse(raw_peer.agent_id)
    raw_peer.hello()
    raw_peer.send(Announce(1, SIZE, ((0, 1),)))
    raw_peer.data(1, 0, SIZE)
    settle(lambda: Gone() in raw_peer.received or not raw_peer.endpoint.alive, owner, raw_peer)
    for _ in range(50):
        owner.poll()
    assert (owner.pool.data == 0xEE).all()
