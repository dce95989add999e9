"""The rules that every transport keeps; see kv_transfer/transports/transport.py."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bench.faults.plan import FaultPlan
from bench.faults.transport import FaultyTransport
from kv_transfer.layout import KvLayout
from kv_transfer.transports import make_transport
from kv_transfer.transports.nixl.binding import NixlAgent
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.transport import MAX_METADATA_BYTES, TransferEndpoint, Transport, WriteResult
from kv_transfer.transports.ucx.binding import UcxEndpoint
from kv_transfer.transports.ucx.transport import UcxTransport
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError, TransferError
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from tests.support.transfer.numpy_pool import LAYOUT, NumpyPool
from tests.support.transfer.peer_process import NUM_BLOCKS as PEER_BLOCKS
from tests.support.transfer.peer_process import PeerProcess
from tests.support.transfer.ucx import require_ucx
from tests.support.waiting import PATIENCE_S

WRITER_BLOCKS, OWNER_BLOCKS = 24, 16
SETTLE_S = PATIENCE_S


@dataclass
class Side:
    """A transport with its memory, and all results of its polls."""

    transport: Transport
    pool: NumpyPool
    endpoint: TransferEndpoint = field(init=False)
    writes: list[WriteResult] = field(default_factory=list)
    notifications: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.endpoint = self.transport.register_memory(self.pool.memory)

    @property
    def agent_id(self) -> str:
        return self.endpoint.agent_id

    def poll(self) -> None:
        result = self.transport.poll()
        self.writes += result.writes
        self.notifications += result.notifications


Maker = Callable[[], Transport]


SLOW = FaultPlan(latency_s=0.002, bandwidth_bytes_per_s=20e6)
POLLED = "nixl as for devices"
KINDS = ("memory", "nixl", POLLED, "ucx", "memory with no fault", "memory that is slow", "nixl that is slow")


def require(kind: str) -> None:
    """Skips the test where the transport is not installed."""
    if kind == UcxTransport.kind:
        require_ucx()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    require(request.param)
    hub, made = MemoryHub(), list[Transport]()
    makers: dict[str, Maker] = {
        "memory": lambda: MemoryTransport(hub),
        "nixl": NixlTransport,
        POLLED: lambda: NixlTransport(progress_thread=False),
        "ucx": UcxTransport,
        "memory with no fault": lambda: FaultyTransport(MemoryTransport(hub), FaultPlan()),
        "memory that is slow": lambda: FaultyTransport(MemoryTransport(hub), SLOW),
        "nixl that is slow": lambda: FaultyTransport(NixlTransport(), SLOW),
    }

    def make_one() -> Transport:
        made.append(makers[request.param]())
        return made[-1]

    yield make_one
    for transport in made:
        transport.close()
    gc.collect()


@pytest.fixture
def owner(make: Maker) -> Side:
    return Side(make(), NumpyPool(OWNER_BLOCKS, fill=0xEE))


@pytest.fixture
def writer(make: Maker, owner: Side) -> Side:
    side = Side(make(), NumpyPool(WRITER_BLOCKS))
    side.pool.stamp(1)
    side.transport.connect(owner.endpoint)
    return side


def settle(condition: Callable[[], bool], *sides: Side) -> None:
    """Polls all sides until the condition holds."""
    end = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < end, "the transports do not settle"
        for side in sides:
            side.poll()


def test_bytes_arrive_exactly_in_the_named_blocks(writer: Side, owner: Side) -> None:
    expected = owner.pool.data.copy()
    local, remote = [3, 4, 5, 9, 0, 23], [7, 8, 9, 10, 0, 15]
    expected[remote] = writer.pool.data[local]
    handle = writer.transport.write(owner.agent_id, local, remote, b"done")
    settle(lambda: bool(writer.writes and owner.notifications), writer, owner)
    assert writer.writes == [WriteResult(handle)]
    assert owner.notifications == [(writer.agent_id, b"done")]
    np.testing.assert_array_equal(owner.pool.data, expected)


def test_a_notification_comes_after_the_bytes_of_its_write(writer: Side, owner: Side) -> None:
    for turn in range(20):
        writer.pool.data[:] = turn
        writer.transport.write(owner.agent_id, range(OWNER_BLOCKS), range(OWNER_BLOCKS), b"%d" % turn)
        while len(owner.notifications) <= turn:
            writer.poll()
            owner.poll()
        assert int(owner.pool.data.min()) == int(owner.pool.data.max()) == turn
        settle(lambda turn=turn: len(writer.writes) > turn, writer, owner)  # type: ignore[misc]


def test_many_writes_at_once(writer: Side, owner: Side) -> None:
    rng = np.random.default_rng(7)
    remote = rng.permutation(OWNER_BLOCKS).tolist()
    local = rng.integers(0, WRITER_BLOCKS, OWNER_BLOCKS).tolist()
    handles = [
        writer.transport.write(owner.agent_id, [a], [b], b"n%d" % b)
        for a, b in zip(local, remote, strict=True)
    ]
    settle(
        lambda: len(writer.writes) == OWNER_BLOCKS and len(owner.notifications) == OWNER_BLOCKS, writer, owner
    )
    assert sorted(w.handle for w in writer.writes) == sorted(handles)
    assert len(set(handles)) == OWNER_BLOCKS
    assert {message for _, message in owner.notifications} == {b"n%d" % b for b in remote}
    np.testing.assert_array_equal(owner.pool.data[remote], writer.pool.data[local])


def test_notify_without_bytes(writer: Side, owner: Side) -> None:
    writer.transport.notify(owner.agent_id, b"x" * 4096)
    settle(lambda: bool(owner.notifications), writer, owner)
    assert owner.notifications == [(writer.agent_id, b"x" * 4096)]


def test_both_directions(writer: Side, owner: Side) -> None:
    owner.transport.connect(writer.endpoint)
    writer.transport.write(owner.agent_id, [1], [2], b"to owner")
    owner.transport.write(writer.agent_id, [5], [6], b"to writer")
    settle(lambda: bool(owner.notifications and writer.notifications), writer, owner)
    np.testing.assert_array_equal(owner.pool.data[2], writer.pool.data[1])
    np.testing.assert_array_equal(writer.pool.data[6], owner.pool.data[5])


@pytest.mark.parametrize(
    ("local", "remote", "runs"),
    [([0], [3], 1), ([0, 1, 2], [4, 5, 6], 1), ([0, 1, 5], [4, 5, 6], 2), ([3, 2, 1], [4, 5, 6], 3)],
)
def test_one_descriptor_a_run(
    writer: Side, owner: Side, local: list[int], remote: list[int], runs: int
) -> None:
    writer.transport.write(owner.agent_id, local, remote)
    assert writer.transport.descriptors_posted == runs
    settle(lambda: bool(writer.writes), writer, owner)


@pytest.mark.parametrize(
    ("local", "remote", "name"),
    [
        ([WRITER_BLOCKS], [0], "local_blocks"),
        ([-1], [0], "local_blocks"),
        ([0], [OWNER_BLOCKS], "remote_blocks"),
        ([0], [-1], "remote_blocks"),
        ([], [], "local_blocks"),
        ([0, 1], [0], "remote_blocks"),
    ],
)
def test_bad_blocks_are_refused(
    writer: Side, owner: Side, local: list[int], remote: list[int], name: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        writer.transport.write(owner.agent_id, local, remote)
    assert caught.value.field == name
    assert (owner.pool.data == 0xEE).all()
    assert writer.transport.descriptors_posted == 0


def test_empty_notifications_are_refused(writer: Side, owner: Side) -> None:
    with pytest.raises(InvalidArgumentError):
        writer.transport.write(owner.agent_id, [0], [0], b"")
    with pytest.raises(InvalidArgumentError):
        writer.transport.notify(owner.agent_id, b"")


def test_unknown_peer(writer: Side) -> None:
    with pytest.raises(TransferError):
        writer.transport.write("nobody", [0], [0])
    with pytest.raises(TransferError):
        writer.transport.notify("nobody", b"x")
    writer.transport.disconnect("nobody")


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float32"), ("block_size_tokens", 24), ("num_layers", 3), ("model_fingerprint", "0" * 64)],
)
def test_unequal_layout_is_refused_by_field(writer: Side, make: Maker, name: str, value: object) -> None:
    layout: KvLayout = replace(LAYOUT, **{name: value})  # type: ignore[arg-type]
    other = Side(make(), NumpyPool(4, layout=layout))
    with pytest.raises(FailedPreconditionError) as caught:
        writer.transport.connect(other.endpoint)
    assert (caught.value.reason, caught.value.field) == ("LAYOUT_MISMATCH", name)
    assert other.agent_id not in writer.transport.connected()


def test_other_transport_is_refused(writer: Side, owner: Side) -> None:
    foreign = replace(owner.endpoint, agent_id="other", transport="pigeon")
    with pytest.raises(FailedPreconditionError) as caught:
        writer.transport.connect(foreign)
    assert caught.value.field == "transport"


def test_bad_endpoints_are_refused(writer: Side, owner: Side) -> None:
    good = owner.endpoint
    bad = [
        replace(good, agent_id="stranger", metadata=b"garbage"),
        replace(good, agent_id="stranger", metadata=b"x" * (MAX_METADATA_BYTES + 1)),
        replace(good, agent_id="stranger"),
        replace(good, agent_id=""),
        replace(good, agent_id="stranger", memory=replace(good.memory, num_blocks=0)),
        replace(good, agent_id="stranger", memory=replace(good.memory, base_address=0)),
        replace(good, agent_id="stranger", memory=replace(good.memory, memory_kind="DISK")),
        writer.endpoint,
    ]
    for endpoint in bad:
        with pytest.raises(SplitserveError):
            writer.transport.connect(endpoint)
    assert writer.transport.connected() == {owner.agent_id}
    writer.transport.write(owner.agent_id, [0], [0])
    settle(lambda: bool(writer.writes), writer, owner)


def test_memory_is_registered_once(writer: Side) -> None:
    with pytest.raises(FailedPreconditionError):
        writer.transport.register_memory(writer.pool.memory)


def test_connect_and_close_are_idempotent(writer: Side, owner: Side) -> None:
    writer.transport.connect(owner.endpoint)
    assert writer.transport.connected() == {owner.agent_id}
    writer.transport.close()
    writer.transport.close()
    assert writer.transport.connected() == frozenset()
    assert writer.transport.poll().writes == []
    writer.transport.disconnect(owner.agent_id)


def test_disconnect_ends_writes_and_drops_the_peer(writer: Side, owner: Side) -> None:
    handles = {writer.transport.write(owner.agent_id, [0], [block]) for block in range(4)}
    writer.transport.disconnect(owner.agent_id)
    assert writer.transport.connected() == frozenset()
    settle(lambda: len(writer.writes) == 4, writer)
    assert {w.handle for w in writer.writes} == handles
    over = isinstance(
        writer.transport, MemoryTransport | FaultyTransport
    )  # held or not executed: no byte left
    assert all(over or w.error is None or w.in_doubt for w in writer.writes)
    with pytest.raises(TransferError):
        writer.transport.write(owner.agent_id, [0], [0])


@pytest.mark.parametrize(
    ("transport", "call"), [(NixlTransport, (NixlAgent, "post")), (UcxTransport, (UcxEndpoint, "send"))]
)
def test_a_post_that_fails_half_way_is_in_doubt(
    transport: type[Transport], call: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require(transport.kind)
    with contextlib.closing(transport()) as mine, contextlib.closing(transport()) as theirs:
        writer, owner = Side(mine, NumpyPool(WRITER_BLOCKS)), Side(theirs, NumpyPool(OWNER_BLOCKS))
        writer.transport.connect(owner.endpoint)
        writer.transport.write(owner.agent_id, [0], [0])
        settle(lambda: bool(writer.writes), writer, owner)
        assert not writer.writes[0].in_doubt

        def refused(*_: object) -> None:
            raise TransferError("no descriptor left")

        monkeypatch.setattr(*call, refused)
        handle = writer.transport.write(owner.agent_id, [1, 5], [1, 5], b"done")
        monkeypatch.undo()
        settle(lambda: len(writer.writes) == 2, writer, owner)
        assert writer.writes[1].handle == handle
        assert writer.writes[1].error
        assert writer.writes[1].in_doubt


def test_nothing_of_a_fenced_peer_is_delivered(writer: Side, owner: Side, make: Maker) -> None:
    third = Side(make(), NumpyPool(4))
    third.transport.connect(owner.endpoint)
    owner.transport.refuse(writer.agent_id)
    with contextlib.suppress(TransferError):  # the writer may have seen the fence already
        writer.transport.notify(owner.agent_id, b"stale")
    third.transport.notify(owner.agent_id, b"fresh")
    settle(lambda: bool(owner.notifications), writer, third, owner)
    for _ in range(100):
        writer.poll()
        owner.poll()
    assert owner.notifications == [(third.agent_id, b"fresh")]


def acquainted(writer: Side, owner: Side) -> None:
    """Both have written to each other: whoever is refused has been a peer for a while."""
    owner.transport.connect(writer.endpoint)
    owner.transport.write(writer.agent_id, [0], [0], b"there")
    writer.transport.write(owner.agent_id, [0], [0], b"back")
    settle(
        lambda: bool(writer.writes and owner.writes and writer.notifications and owner.notifications),
        writer,
        owner,
    )
    for side in (writer, owner):
        side.writes.clear()
        side.notifications.clear()


def test_a_refused_peer_that_is_connected_is_heard_again(writer: Side, owner: Side) -> None:
    acquainted(writer, owner)
    owner.transport.refuse(writer.agent_id)
    owner.transport.connect(writer.endpoint)
    settle(lambda: not writer.transport.needs_poll and not owner.transport.needs_poll, writer, owner)
    writer.transport.disconnect(owner.agent_id)  # where the owner had closed it
    writer.transport.connect(owner.endpoint)
    writer.transport.write(owner.agent_id, [3], [3], b"again")
    settle(lambda: bool(owner.notifications), writer, owner)
    assert owner.notifications == [(writer.agent_id, b"again")]


@pytest.mark.parametrize("heard_before", [True, False])
def test_a_peer_that_is_written_to_no_more_still_writes(
    writer: Side, owner: Side, heard_before: bool
) -> None:
    """Between workers that write to each other, one direction ends and the other goes on."""
    owner.transport.connect(writer.endpoint)
    if heard_before:
        writer.transport.write(owner.agent_id, [0], [0], b"first")
        owner.transport.write(writer.agent_id, [0], [0], b"back")
        settle(lambda: bool(owner.notifications and writer.notifications), writer, owner)
    before, taken = len(owner.notifications), len(writer.writes)
    owner.transport.disconnect(writer.agent_id)
    assert writer.agent_id not in owner.transport.connected()
    handle = writer.transport.write(owner.agent_id, [1, 2], [5, 9], b"done")
    settle(lambda: len(writer.writes) > taken and len(owner.notifications) > before, writer, owner)
    assert writer.writes[-1] == WriteResult(handle)
    assert owner.notifications[-1] == (writer.agent_id, b"done")
    np.testing.assert_array_equal(owner.pool.data[[5, 9]], writer.pool.data[[1, 2]])
    writer.transport.notify(owner.agent_id, b"alone")
    settle(lambda: owner.notifications[-1] == (writer.agent_id, b"alone"), writer, owner)


def test_writes_to_a_refused_peer_go_on(writer: Side, owner: Side) -> None:
    acquainted(writer, owner)
    writer.transport.refuse(owner.agent_id)
    with contextlib.suppress(TransferError):
        owner.transport.notify(writer.agent_id, b"stale")
    assert owner.agent_id in writer.transport.connected()
    handle = writer.transport.write(owner.agent_id, [4], [6], b"done")
    settle(lambda: bool(writer.writes and owner.notifications), writer, owner)
    assert writer.writes == [WriteResult(handle)]
    assert owner.notifications == [(writer.agent_id, b"done")]
    assert writer.notifications == []


@pytest.mark.parametrize(("heard_before", "polls"), [(False, 2), (False, 3), (True, 0), (True, 2)])
def test_a_peer_may_be_refused_in_the_middle_of_its_handshake(
    writer: Side, owner: Side, heard_before: bool, polls: int
) -> None:
    """It returns at once, and this side's writes go on, over a connection that both may have joined or not."""
    if heard_before:
        writer.poll()
        owner.poll()
    owner.transport.connect(writer.endpoint)
    for number in range(polls):
        (writer if number % 2 else owner).poll()
    writer.transport.refuse(owner.agent_id)
    with contextlib.suppress(TransferError):
        owner.transport.notify(writer.agent_id, b"stale")
    handle = writer.transport.write(owner.agent_id, [4], [6], b"done")
    settle(lambda: bool(writer.writes and owner.notifications), writer, owner)
    assert writer.writes == [WriteResult(handle)]
    assert owner.notifications == [(writer.agent_id, b"done")]
    assert writer.notifications == []


def test_a_peer_that_disconnected_can_connect_again(writer: Side, owner: Side) -> None:
    writer.transport.write(owner.agent_id, [0], [0], b"first")
    settle(lambda: bool(writer.writes and owner.notifications), writer, owner)
    writer.transport.disconnect(owner.agent_id)
    writer.transport.connect(owner.endpoint)
    writer.transport.write(owner.agent_id, [1], [1], b"second")
    settle(lambda: len(writer.writes) == 2 and len(owner.notifications) == 2, writer, owner)
    assert writer.writes[-1].error is None
    np.testing.assert_array_equal(owner.pool.data[1], writer.pool.data[1])


def test_a_restarted_peer_has_a_new_agent_id(writer: Side, owner: Side, make: Maker) -> None:
    owner.transport.close()
    writer.transport.disconnect(owner.agent_id)
    again = Side(make(), NumpyPool(OWNER_BLOCKS))
    assert again.agent_id != owner.agent_id
    writer.transport.connect(again.endpoint)
    writer.transport.write(again.agent_id, [2], [3], b"hi")
    settle(lambda: bool(again.notifications), writer, again)
    np.testing.assert_array_equal(again.pool.data[3], writer.pool.data[2])


def test_a_closed_peer_is_an_error_and_no_hang(writer: Side, owner: Side) -> None:
    owner.transport.close()
    errors = 0
    for _ in range(3):
        try:
            writer.transport.write(owner.agent_id, [0], [0], b"x")
        except TransferError:
            errors += 1
    if writer.transport.kind == NixlTransport.kind:
        # Over shared memory NIXL detects the end of a process, not of a transport: a write ends, or stays in
        # flight until the peer is disconnected.
        writer.transport.disconnect(owner.agent_id)
        settle(lambda: len(writer.writes) == 3 - errors, writer)
        return
    settle(lambda: len(writer.writes) == 3 - errors, writer)
    assert all(w.error for w in writer.writes)
    assert writer.transport.connected() == frozenset()


@pytest.fixture(params=["nixl", "ucx"])
def far_kind(request: pytest.FixtureRequest) -> str:
    """The kind of a transport that reaches other processes."""
    kind = str(request.param)
    require(kind)
    return kind


@pytest.fixture
def far_writer(far_kind: str) -> Iterator[Side]:
    side = Side(make_transport(far_kind), NumpyPool(WRITER_BLOCKS))
    side.pool.stamp(2)
    yield side
    side.transport.close()


def _write_until_lost(side: Side, agent_id: str) -> str:
    """Writes to a lost peer; returns the error, raised or reported."""
    try:
        handle = side.transport.write(agent_id, [0], [0], b"lost")
    except TransferError as error:
        return error.message
    settle(lambda: any(w.handle == handle for w in side.writes), side)
    return next(w.error or "" for w in side.writes if w.handle == handle)


def test_between_processes(far_writer: Side, far_kind: str) -> None:
    with PeerProcess(far_kind) as peer:
        far_writer.transport.connect(peer.endpoint)
        far_writer.transport.write(peer.endpoint.agent_id, [1, 2, 9], [30, 31, 0], b"hello")
        settle(peer.answered, far_writer)
        sender, message, data = peer.next_notification()
    assert (sender, message) == (far_writer.agent_id, b"hello")
    expected = np.zeros((PEER_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    expected[[30, 31, 0]] = far_writer.pool.data[[1, 2, 9]]
    assert data == expected.tobytes()


def test_peer_killed_then_replaced(far_writer: Side, far_kind: str) -> None:
    with PeerProcess(far_kind) as peer:
        far_writer.transport.connect(peer.endpoint)
        far_writer.transport.write(peer.endpoint.agent_id, [0], [0], b"hello")
        settle(peer.answered, far_writer)
        peer.kill()
        assert _write_until_lost(far_writer, peer.endpoint.agent_id)
        assert far_writer.transport.connected() == frozenset()
        with pytest.raises(TransferError):
            far_writer.transport.notify(peer.endpoint.agent_id, b"late")
        far_writer.transport.disconnect(peer.endpoint.agent_id)
    with PeerProcess(far_kind) as peer:
        far_writer.transport.connect(peer.endpoint)
        far_writer.transport.write(peer.endpoint.agent_id, [3], [5], b"again")
        settle(peer.answered, far_writer)
        assert peer.next_notification()[:2] == (far_writer.agent_id, b"again")


def test_peer_killed_before_the_first_write(far_writer: Side, far_kind: str) -> None:
    with PeerProcess(far_kind) as peer:
        far_writer.transport.connect(peer.endpoint)
        peer.kill()
        assert _write_until_lost(far_writer, peer.endpoint.agent_id)


def test_frozen_peer_holds_neither_disconnect_nor_close(far_writer: Side, far_kind: str) -> None:
    with PeerProcess(far_kind) as peer:
        far_writer.transport.connect(peer.endpoint)
        far_writer.transport.write(peer.endpoint.agent_id, [0], [0], b"hello")
        settle(lambda: peer.answered() and len(far_writer.writes) == 1, far_writer)
        peer.freeze()
        handle = far_writer.transport.write(peer.endpoint.agent_id, [1], [1], b"frozen")
        for _ in range(100):
            far_writer.poll()
        completed = len(far_writer.writes) == 2  # one-sided bytes need nobody over there
        assert far_kind == "nixl" or not completed
        far_writer.transport.disconnect(peer.endpoint.agent_id)
        far_writer.poll()
        assert far_writer.writes[-1].handle == handle
        assert completed or far_writer.writes[-1].error
        far_writer.transport.close()
