"""The ucx transport in front of a peer that does not keep to the protocol: nothing lands, nobody else suffers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_transfer.ucx_binding import Operation, UcxEndpoint, UcxWorker, load_ucxx, to_memory
from kv_transfer.ucx_inbox import UcxInbox
from kv_transfer.ucx_messages import (
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
    encode_card,
)
from kv_transfer.ucx_transport import UcxTransport
from splitserve.errors import UnavailableError
from tests.fakes.numpy_pool import LAYOUT, NumpyPool

BLOCKS, SESSION = 8, 77
SIZE = LAYOUT.block_bytes


class Stranger:
    """Speaks the protocol's bytes by hand."""

    def __init__(self, address: bytes, session: int = SESSION) -> None:
        self.worker = UcxWorker()
        self.inbox = UcxInbox(self.worker)
        self.agent_id = str(uuid.uuid4())
        self.session = session
        self.endpoint: UcxEndpoint = self.worker.connect(address)
        self.sent: list[Operation] = []
        self.heard: list[Message] = []

    def say(self, message: Message | bytes, kind: Kind = Kind.CALL) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.sent.append(self.endpoint.send(to_memory(data), Tag(kind, self.session).value))

    def hello(self) -> None:
        self.say(Hello(encode_card(self.agent_id, self.worker.address)))

    def data(self, write: int, run: int, size: int) -> None:
        tag = Tag(Kind.DATA, self.session, write, run).value
        self.sent.append(self.endpoint.send(np.full(size, 0x55, dtype=np.uint8), tag))

    def poll(self) -> None:
        self.worker.progress()
        self.heard += [decode(data) for _, data in self.inbox.collect()]

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
        self.endpoint = self.transport.register_pool(self.pool.memory)
        self.heard: list[tuple[str, bytes]] = []
        self.address = bytes(self.endpoint.metadata[56:])

    def poll(self) -> None:
        self.heard += self.transport.poll().notifications


@pytest.fixture
def owner() -> Iterator[Owner]:
    try:
        load_ucxx()
    except UnavailableError as error:
        pytest.skip(error.message)
    owner = Owner()
    yield owner
    owner.transport.close()


@pytest.fixture
def stranger(owner: Owner) -> Iterator[Stranger]:
    stranger = Stranger(owner.address)
    yield stranger
    stranger.close()


def settle(condition: Callable[[], bool], *sides: Owner | Stranger) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "nothing comes of it"
        for side in sides:
            side.poll()


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
    owner: Owner, stranger: Stranger, runs: tuple[tuple[int, int], ...], total: int
) -> None:
    stranger.hello()
    stranger.say(Announce(5, total, runs))
    for run in range(len(runs)):
        stranger.data(5, run, SIZE)
    settle(lambda: bool(stranger.heard), owner, stranger)
    (answer,) = stranger.heard
    assert isinstance(answer, Refused)
    settle(lambda: all(operation.over for operation in stranger.sent), owner, stranger)
    assert (owner.pool.data == 0xEE).all()
    stranger.say(Announce(5, SIZE, ((2, 1),)))  # the number is free again
    stranger.data(5, 0, SIZE)
    settle(lambda: len(stranger.heard) == 2, owner, stranger)
    assert stranger.heard[1] == Ack(5)
    assert (owner.pool.data[2] == 0x55).all()


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1, 64 * SIZE])
def test_a_run_of_another_length_never_lands(owner: Owner, stranger: Stranger, size: int) -> None:
    stranger.hello()
    stranger.say(Announce(1, SIZE, ((3, 1),)))
    stranger.data(1, 0, size)
    settle(lambda: bool(stranger.heard), owner, stranger)
    assert isinstance(stranger.heard[0], Refused)
    assert (owner.pool.data == 0xEE).all()


@pytest.mark.parametrize("bad", [b"\x63", b"\x02short", encode(Ack(1)), encode(Announce(1, SIZE, ((0, 1),)))])
def test_a_malformed_message_ends_the_session(owner: Owner, stranger: Stranger, bad: bytes) -> None:
    stranger.hello()
    stranger.say(Announce(1, SIZE, ((0, 1),)))
    stranger.say(bad)
    settle(lambda: Gone() in stranger.heard or not stranger.endpoint.alive, owner, stranger)
    assert (owner.pool.data == 0xEE).all()


def test_nothing_is_taken_from_a_session_without_a_beginning(owner: Owner, stranger: Stranger) -> None:
    other = Stranger(owner.address, session=SESSION + 1)
    stranger.say(Announce(1, SIZE, ((0, 1),)))
    stranger.data(1, 0, SIZE)
    stranger.data(9, 9, 64 * SIZE)
    stranger.say(Notice(b"hi"))
    stranger.say(Hello(b"no card"))
    stranger.say(b"x" * (2**20 + 1))
    settle(lambda: all(operation.over for operation in stranger.sent), owner, stranger)
    other.hello()
    other.say(Notice(b"still here"))
    settle(lambda: bool(owner.heard), owner, stranger, other)
    assert owner.heard == [(other.agent_id, b"still here")]
    assert (owner.pool.data == 0xEE).all()
    assert stranger.heard == []
    other.close()


def test_a_fenced_agent_cannot_write_any_more(owner: Owner, stranger: Stranger) -> None:
    owner.transport.disconnect(stranger.agent_id)
    stranger.hello()
    stranger.say(Announce(1, SIZE, ((0, 1),)))
    stranger.data(1, 0, SIZE)
    settle(lambda: Gone() in stranger.heard or not stranger.endpoint.alive, owner, stranger)
    for _ in range(50):
        owner.poll()
    assert (owner.pool.data == 0xEE).all()
