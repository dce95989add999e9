"""Fields are counted on the wire before a message is parsed, whatever the bytes are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import InvalidArgumentError
from splitserve.rpc.message_bounds import check_fields
from splitserve.v1 import inference_pb2
from tests.support.clients.fuzz import changed, damaged

KIND = inference_pb2.GenerateRequest.DESCRIPTOR
PICKS = st.integers(0, 2**64 - 1).map(random.Random)


def chat(messages: int) -> bytes:
    request = inference_pb2.GenerateRequest()
    for _ in range(messages):
        request.chat.messages.add(role="user", content="a")
    return request.SerializeToString()


def fields_of(data: bytes) -> int:
    """The least bound that lets the message pass."""
    low, high = 0, len(data) + 1
    while low < high:
        middle = (low + high) // 2
        try:
            check_fields(data, KIND, middle)
            high = middle
        except InvalidArgumentError:
            low = middle + 1
    return low


def test_nested_fields_count_and_a_packed_list_is_one() -> None:
    assert fields_of(b"") == 0
    assert fields_of(chat(5)) == 1 + 5 + 10
    many = inference_pb2.GenerateRequest(text="a" * 1000)
    assert fields_of(many.SerializeToString()) == 1
    many.token_ids.ids.extend(range(1000))
    assert fields_of(many.SerializeToString()) == 2


def test_a_message_of_two_bytes_each() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_fields(b"\x2a\0" * 70_000, KIND)
    assert caught.value.reason == "TOO_MANY_FIELDS"


def test_a_conversation_of_the_most_messages_passes() -> None:
    check_fields(chat(4096), KIND)


@given(PICKS)
def test_any_bytes_are_counted_to_their_end(pick: random.Random) -> None:
    valid = changed(pick, inference_pb2.GenerateRequest.FromString(chat(3))).SerializeToString()
    data = pick.choice([valid, damaged(pick, valid), pick.randbytes(pick.randint(0, 300))])
    assert 0 <= fields_of(data) <= len(data)
