"""Each head of each decode rank is written exactly once, by a rank that holds it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kv_transfer.layout import Shard, held_heads, shard_map
from splitserve.errors import InvalidArgumentError

UP_TO = range(1, 9)


def fits(ranks: int, kv_heads: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


@pytest.mark.parametrize(("prefill", "decode", "kv_heads"), list(product(UP_TO, UP_TO, UP_TO)))
def test_every_head_of_every_reader_is_written_once(prefill: int, decode: int, kv_heads: int) -> None:
    if not (fits(prefill, kv_heads) and fits(decode, kv_heads)):
        with pytest.raises(InvalidArgumentError) as refused:
            shard_map(prefill, decode, kv_heads)
        assert refused.value.field == "tensor_parallel_size"
        return
    shards = shard_map(prefill, decode, kv_heads)
    written = Counter[tuple[int, int]]()
    for shard in shards:
        source = held_heads(prefill, shard.writer, kv_heads)
        target = held_heads(decode, shard.reader, kv_heads)
        for step in range(shard.heads):
            head = target[shard.reader_head + step]
            assert source[shard.writer_head + step] == head
            written[shard.reader, head] += 1
    wanted = {(reader, head) for reader in range(decode) for head in held_heads(decode, reader, kv_heads)}
    assert written == Counter(wanted)
    pairs = [(shard.writer, shard.reader) for shard in shards]
    assert len(pairs) == len(set(pairs)), "a pair of ranks has one run of heads, so one range a block"


@pytest.mark.parametrize(("ranks", "kv_heads"), [p for p in product(UP_TO, UP_TO) if fits(*p)])
def test_every_head_is_held_by_as_many_ranks(ranks: int, kv_heads: int) -> None:
    holders = Counter(head for rank in range(ranks) for head in held_heads(ranks, rank, kv_heads))
    assert set(holders) == set(range(kv_heads))
    assert set(holders.values()) == {max(1, ranks // kv_heads)}


def test_replicas_share_their_readers() -> None:
    """One head on four prefill ranks, read by four decode ranks: each writes once."""
    assert shard_map(4, 4, 1) == tuple(Shard(rank, rank, 0, 0, 1) for rank in range(4))


def test_equal_ranks_write_to_their_like() -> None:
    assert shard_map(2, 2, 4) == (Shard(0, 0, 0, 0, 2), Shard(1, 1, 0, 0, 2))


@pytest.mark.parametrize(
    ("ranks", "rank", "kv_heads"), [(0, 0, 4), (65, 0, 65), (2, 2, 4), (2, -1, 4), (1, 0, 0)]
)
def test_what_cannot_be_is_refused(ranks: int, rank: int, kv_heads: int) -> None:
    with pytest.raises(InvalidArgumentError):
        held_heads(ranks, rank, kv_heads)
