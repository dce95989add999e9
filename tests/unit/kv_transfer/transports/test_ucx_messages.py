"""Messages of the ucx transport: they round-trip, and other bytes are refused."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports.ucx import messages
from kv_transfer.transports.ucx.messages import (
    Ack,
    Announce,
    Gone,
    Hello,
    Notice,
    Refused,
    Tag,
    decode,
    encode,
)
from splitserve.errors import TransferError

AGENT = str(uuid.uuid4())
WRITES = st.integers(0, messages.MAX_WRITES - 1)
NUMBERS = st.integers(0, 2**32 - 1)
SENT = st.one_of(
    st.builds(Hello, st.binary(max_size=64)),
    st.builds(
        Announce,
        WRITES,
        st.integers(0, 2**64 - 1),
        st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9).map(tuple),
    ),
    st.builds(Notice, st.binary(min_size=1, max_size=64)),
    st.just(Gone()),
    st.builds(Ack, WRITES),
    st.builds(Refused, WRITES, st.text(max_size=60)),
)


@given(SENT)
def test_what_is_said_is_understood(message: messages.Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_read_as_what_they_spell(data: bytes) -> None:
    try:
        message = decode(data)
    except TransferError:
        return
    if not isinstance(message, Gone | Refused | Ack):  # trailing bytes of these are ignored
        assert encode(message) == data


@given(st.integers(0, 15), NUMBERS, WRITES, st.integers(0, messages.MAX_RUNS - 1))
def test_tags(kind: int, session: int, write: int, run: int) -> None:
    tag = Tag(kind, session, write, run)
    assert Tag.parse(tag.value) == tag
    assert tag.value & messages.WRITE_MASK == Tag(kind, session, write).value


def test_an_announcement_must_be_whole() -> None:
    data = encode(Announce(3, 4096, ((0, 1), (5, 3))))
    for bad in (data[:-1], data + b"x", data[:6], data[:1]):
        with pytest.raises(TransferError):
            decode(bad)


def test_a_long_reason_is_cut() -> None:
    refused = decode(encode(Refused(1, "x" * 5000)))
    assert isinstance(refused, Refused)
    assert len(refused.why) == messages.MAX_REASON_BYTES


def test_metadata_names_its_agent_and_shows_damage() -> None:
    metadata = messages.encode_metadata(AGENT, b"address")
    assert messages.decode_metadata(metadata) == (AGENT, b"address")
    for bad in (
        b"",
        b"garbage",
        metadata[:-1],
        metadata + b"x",
        metadata[:-1] + b"X",
        metadata.replace(b"SSU1", b"SSU2"),
    ):
        with pytest.raises(TransferError):
            messages.decode_metadata(bad)
