"""`Attachment`: which stream counts, and when the lease ends."""

from __future__ import annotations

import pytest

from decode_worker.output_streams import Attachment
from splitserve.errors import FailedPreconditionError

LEASE_S = 30.0


def test_before_the_first_stream_nothing_is_taken() -> None:
    attachment = Attachment(LEASE_S)
    assert not attachment.is_open
    assert not attachment.takes(0)
    assert not attachment.takes(1)


def test_reservations_belong_to_the_open_stream() -> None:
    attachment = Attachment(LEASE_S)
    attachment.open(4)
    assert [attachment.takes(number) for number in (0, 3, 4, 5)] == [False, False, True, False]
    attachment.open(7)
    assert [attachment.takes(number) for number in (4, 7)] == [False, True]


def test_a_broken_stream_begins_the_lease_and_the_next_one_ends_it() -> None:
    attachment = Attachment(LEASE_S)
    attachment.open(1)
    assert attachment.lease_end_s == float("inf")
    assert attachment.close(1, 100.0)
    assert attachment.lease_end_s == 130.0
    assert not attachment.takes(1)
    attachment.open(2)
    assert attachment.lease_end_s == float("inf")


def test_a_stream_ends_once() -> None:
    attachment = Attachment(LEASE_S)
    attachment.open(1)
    assert attachment.close(1, 100.0)
    assert not attachment.close(1, 120.0)
    assert attachment.lease_end_s == 130.0


def test_the_end_of_a_replaced_stream_changes_nothing() -> None:
    attachment = Attachment(LEASE_S)
    attachment.open(1)
    attachment.open(2)
    assert not attachment.close(1, 100.0)
    assert attachment.takes(2)


@pytest.mark.parametrize("closed", [False, True])
def test_an_older_stream_that_arrives_late_is_refused(closed: bool) -> None:
    attachment = Attachment(LEASE_S)
    attachment.open(5)
    if closed:
        attachment.close(5, 1.0)
    for number in (0, 1, 5):
        with pytest.raises(FailedPreconditionError) as caught:
            attachment.open(number)
        assert caught.value.reason == "STALE_ATTACHMENT"
    assert attachment.is_open != closed
    attachment.open(6)
