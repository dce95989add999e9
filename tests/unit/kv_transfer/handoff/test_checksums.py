"""Checksums of handoffs: both sides verify the same blocks, and one wrong byte is detected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff.checksums import (
    HandoffVerifier,
    KvMemory,
    digests_of,
    fold_digests,
    verified_positions,
    verify_one_in,
)
from kv_transfer.handoff.messages import (
    MAX_CHECKSUMS,
    MAX_NOTIFICATION_BYTES,
    WriteCompletion,
    decode,
    encode,
)
from splitserve.v1 import kv_transfer_pb2 as pb
from tests.support.transfer.numpy_pool import NumpyPool

EPOCH, NUMBER = 77, 5


def kv_memory(pool: NumpyPool) -> KvMemory:
    return KvMemory(pool.memory, lambda blocks: [memoryview(pool.data[block]) for block in blocks])


def a_completion(pool: NumpyPool, blocks: list[int], one_in: int) -> WriteCompletion:
    positions = verified_positions(EPOCH, NUMBER, len(blocks), one_in)
    digests = digests_of(memoryview(pool.data[blocks[p]]) for p in positions)
    return WriteCompletion(EPOCH, NUMBER, 1, 2, fold_digests(digests))


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1), st.integers(1, 5000), st.sampled_from([1, 16]))
def test_at_least_one_block_is_verified_and_about_one_in_so_many(
    epoch: int, number: int, count: int, one_in: int
) -> None:
    positions = verified_positions(epoch, number, count, one_in)
    assert positions[0] >= 0
    assert positions[-1] < count
    assert count // one_in <= max(1, len(positions)) <= count // one_in + 1


def test_other_tickets_verify_other_blocks() -> None:
    assert len({verified_positions(EPOCH, number, 160, 16)[0] for number in range(1, 200)}) == 16
    assert not verified_positions(EPOCH, NUMBER, 100, 0)
    assert not verified_positions(EPOCH, NUMBER, 0, 1)


@pytest.mark.parametrize("one_in", [1, 16])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_right_bytes_match_and_a_flipped_bit_does_not(one_in: int, count: int) -> None:
    sent, arrived = NumpyPool(256), NumpyPool(256)
    sent.stamp(3)
    local, remote = list(range(count)), list(range(255, 255 - count, -1))
    arrived.data[remote] = sent.data[local]
    verifier = HandoffVerifier(EPOCH, one_in, kv_memory(arrived))
    completion = a_completion(sent, local, one_in)
    verifier.expect(NUMBER, remote)
    assert verifier.matches(completion)
    last = verified_positions(EPOCH, NUMBER, count, one_in)[-1]
    arrived.data[remote[last], 7] ^= 1
    verifier.expect(NUMBER, remote)
    assert not verifier.matches(completion)


def test_missing_or_unasked_checksums_do_not_match() -> None:
    pool = NumpyPool(8)
    verifier = HandoffVerifier(EPOCH, 1, kv_memory(pool))
    verifier.expect(NUMBER, [1, 2])
    assert not verifier.matches(WriteCompletion(EPOCH, NUMBER, 1, 2))
    off = HandoffVerifier(EPOCH, 0, kv_memory(pool))
    off.expect(NUMBER, [1, 2])
    assert off.matches(WriteCompletion(EPOCH, NUMBER, 1, 2))
    assert not off.matches(WriteCompletion(EPOCH, NUMBER, 1, 2, (3,)))


def test_a_completion_stays_small() -> None:
    folded = fold_digests(list(range(2**20, 2**20 + 10_000)))
    assert len(folded) <= MAX_CHECKSUMS
    completion = WriteCompletion(2**63, 2**63, 2**60, 2**31, tuple(2**64 - 1 for _ in range(MAX_CHECKSUMS)))
    assert len(encode(completion)) <= MAX_NOTIFICATION_BYTES
    assert decode(encode(completion)) == completion
    many = pb.KvNotification(completion=pb.KvCompletion(epoch=1, checksums=[1] * (MAX_CHECKSUMS + 1)))
    assert not isinstance(decode(many.SerializeToString()), WriteCompletion)


@pytest.mark.parametrize(
    ("setting", "memory_kind", "one_in"),
    [
        ("auto", "DRAM", 16),
        ("auto", "VRAM", 0),
        ("off", "DRAM", 0),
        ("sampled", "VRAM", 16),
        ("all", "DRAM", 1),
    ],
)
def test_what_a_ticket_asks_for(setting: str, memory_kind: str, one_in: int) -> None:
    assert verify_one_in(setting, memory_kind) == one_in
