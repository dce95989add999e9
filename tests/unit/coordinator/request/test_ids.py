"""Random ids: of the right length, and never repeated."""

from __future__ import annotations

from coordinator.request.inference_request import POOL_BYTES, RandomPool, random_bits, random_hex


def test_no_byte_is_used_twice_across_refills() -> None:
    pool = RandomPool()
    taken = [pool.take(24) for _ in range(2 * POOL_BYTES // 24)]
    assert {len(piece) for piece in taken} == {24}
    assert len(set(taken)) == len(taken)


def test_ids_have_their_length_and_differ() -> None:
    ids = {random_hex() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(name) for name in ids} == {32}
    assert len(random_hex(12)) == 12


def test_bits_use_the_whole_range_and_no_more() -> None:
    drawn = [random_bits(63) for _ in range(1000)]
    assert 2**62 < max(drawn) < 2**63
    assert min(drawn) < 2**62
