"""Random and damaged tickets and notifications: read in full, or refused with a reason.

`SPLITSERVE_FUZZ_EXAMPLES` sets how many are tried.
"""

from __future__ import annotations

import random

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.messages import (
    MAX_CHECKSUMS,
    BadNotification,
    Drained,
    KvTicket,
    WriteCompletion,
    decode,
    encode,
)
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import kv_transfer_pb2 as pb
from tests.support.clients.fuzz import EXAMPLES, FUZZED, changed, damaged

PICKS = st.integers(0, 2**64 - 1).map(random.Random)
COMPLETION = encode(WriteCompletion(7, 8, 4096, 5, (1, 2)))
DRAINED = encode(Drained(7, 8))
TICKET = pb.KvTicket(
    decode_agent_id="agent", epoch=7, reservation=8, block_indices=[1, 2, 3], total_bytes=300, verify_one_in=2
)
TICKET.time_to_live.seconds = 5


def test_notifications() -> None:
    read: list[bool] = []

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        valid = pick.choice([COMPLETION, DRAINED])
        data = changed(pick, pb.KvNotification.FromString(valid)).SerializeToString()
        if pick.random() < 0.5:
            data = pick.choice([damaged(pick, data), pick.randbytes(pick.randint(0, 200)), data * 600])
        found = decode(data)
        read.append(not isinstance(found, BadNotification))
        if isinstance(found, WriteCompletion):
            assert len(found.checksums) <= MAX_CHECKSUMS
            assert decode(encode(found)) == found
        elif isinstance(found, BadNotification):
            assert "\n" not in found.problem

    fuzz()
    assert EXAMPLES / 20 < sum(read) < len(read)


def test_tickets() -> None:
    taken: list[bool] = []

    @FUZZED
    @given(PICKS)
    def fuzz(pick: random.Random) -> None:
        data = changed(pick, TICKET).SerializeToString()
        if pick.random() < 0.25:
            data = damaged(pick, data)
        try:
            ticket = KvTicket.from_proto(pb.KvTicket.FromString(data), now=100.0)
        except (InvalidArgumentError, DecodeError):
            taken.append(False)
            return
        taken.append(True)
        assert ticket.deadline_s > 100
        assert len(set(ticket.block_indices)) == len(ticket.block_indices)
        assert ticket.total_bytes % max(1, len(ticket.block_indices)) == 0

    fuzz()
    assert EXAMPLES / 20 < sum(taken) < len(taken)
