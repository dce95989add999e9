"""Tickets and notifications: everything that a peer sends is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.messages import (
    MAX_NOTIFICATION_BYTES,
    MAX_TIME_TO_LIVE_S,
    BadNotification,
    Drained,
    KvTicket,
    WriteCompletion,
    decode,
    encode,
)
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.errors import DeadlineExceededError, InvalidArgumentError
from splitserve.v1 import kv_transfer_pb2 as pb
from tests.support.transfer.numpy_pool import LAYOUT

MEMORY = KvMemoryRegion(4096, 64, LAYOUT)
U64 = st.integers(1, 2**64 - 1)


def a_ticket(**changes: object) -> KvTicket:
    values: dict[str, object] = {
        "decode_agent_id": "agent",
        "epoch": 7,
        "reservation": 3,
        "block_indices": (4, 5, 9),
        "cached_tokens": 32,
        "total_bytes": 3 * LAYOUT.block_bytes,
        "deadline_s": 110.0,
    }
    return KvTicket(**(values | changes))  # type: ignore[arg-type]


def test_the_deadline_travels_as_time_left() -> None:
    message = a_ticket().to_proto(now=100.0)
    assert message.time_to_live.seconds == 10
    received = KvTicket.from_proto(message, now=5000.0)
    assert received == a_ticket(deadline_s=5010.0)
    received.require_fits(MEMORY)


def test_a_ticket_without_blocks() -> None:
    ticket = a_ticket(block_indices=(), total_bytes=0)
    assert KvTicket.from_proto(ticket.to_proto(100.0), 100.0) == ticket
    ticket.require_fits(MEMORY)


def test_no_time_left() -> None:
    with pytest.raises(DeadlineExceededError):
        a_ticket().to_proto(now=110.0)


@given(U64, U64, st.lists(st.integers(0, 63), unique=True), st.floats(1e-6, MAX_TIME_TO_LIVE_S - 1))
def test_round_trip(epoch: int, number: int, blocks: list[int], left_s: float) -> None:
    size = len(blocks) * LAYOUT.block_bytes
    ticket = a_ticket(
        epoch=epoch, reservation=number, block_indices=tuple(blocks), total_bytes=size, deadline_s=left_s
    )
    received = KvTicket.from_proto(ticket.to_proto(0.0), 0.0)
    assert received.deadline_s == pytest.approx(left_s, abs=1e-6)
    received.require_fits(MEMORY)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("epoch", lambda m: m.ClearField("epoch")),
        ("reservation", lambda m: m.ClearField("reservation")),
        ("decode_agent_id", lambda m: m.ClearField("decode_agent_id")),
        ("decode_agent_id", lambda m: setattr(m, "decode_agent_id", "x" * 65)),
        ("block_indices", lambda m: m.block_indices.append(4)),
        ("total_bytes", lambda m: m.ClearField("total_bytes")),
        ("total_bytes", lambda m: setattr(m, "total_bytes", m.total_bytes + 1)),
        ("total_bytes", lambda m: m.ClearField("block_indices")),
        ("time_to_live", lambda m: m.ClearField("time_to_live")),
        ("time_to_live", lambda m: setattr(m.time_to_live, "seconds", -1)),
        ("time_to_live", lambda m: setattr(m.time_to_live, "seconds", 86401)),
    ],
)
def test_bad_tickets_name_their_field(name: str, spoil: Callable[[pb.KvTicket], None]) -> None:
    message = a_ticket().to_proto(100.0)
    spoil(message)
    with pytest.raises(InvalidArgumentError) as caught:
        KvTicket.from_proto(message, 100.0)
    assert caught.value.field == f"ticket.{name}"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("block_indices", {"block_indices": (4, 5, 64)}),
        ("total_bytes", {"total_bytes": 3 * LAYOUT.block_bytes * 2}),
        ("cached_tokens", {"cached_tokens": 33}),
    ],
)
def test_tickets_that_do_not_fit_their_memory(name: str, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        a_ticket(**changes).require_fits(MEMORY)
    assert caught.value.field == f"ticket.{name}"


@given(
    st.one_of(
        st.builds(WriteCompletion, U64, U64, U64, st.integers(0, 2**32 - 1)), st.builds(Drained, U64, U64)
    )
)
def test_notifications_round_trip(message: WriteCompletion | Drained) -> None:
    assert decode(encode(message)) == message
    assert len(encode(message)) < MAX_NOTIFICATION_BYTES


@given(st.binary(max_size=200))
def test_garbage_never_raises(data: bytes) -> None:
    decode(data)


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"x" * (MAX_NOTIFICATION_BYTES + 1)])
def test_garbage_is_told_apart(data: bytes) -> None:
    assert isinstance(decode(data), BadNotification)
