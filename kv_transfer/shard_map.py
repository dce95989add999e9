"""Which rank of a prefill worker writes which KV heads to which rank of a decode worker. Pure.

Tensor parallelism shares the KV heads of a layer out over the ranks of a worker, as vLLM and Megatron-LM do: with up to
as many ranks as heads each rank holds the same number of neighbouring heads; with more, each head is held by the same
number of neighbouring ranks, which are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitserve.errors import InvalidArgumentError

MAX_RANKS = 64
"""As many ranks as `KvLayout.tensor_parallel_size` may name."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Neighbouring heads that one rank writes to another, of each layer and block.

    `writer_head` and `reader_head` are the indices of the first head among those that the rank itself holds.
    """

    writer: int
    reader: int
    writer_head: int
    reader_head: int
    heads: int


def held_heads(ranks: int, rank: int, kv_heads: int) -> range:
    """The KV heads of a layer that `rank` of `ranks` holds.

    Raises InvalidArgumentError where neither number divides the other, so that heads cannot be shared out evenly.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise InvalidArgumentError(
            f"tensor_parallel_size must be 1..{MAX_RANKS}", field="tensor_parallel_size"
        )
    if kv_heads < 1 or (kv_heads % ranks and ranks % kv_heads):
        raise InvalidArgumentError(
            f"{kv_heads} KV heads cannot be shared out over {ranks} ranks: one must divide the other",
            field="tensor_parallel_size",
        )
    if not 0 <= rank < ranks:
        raise InvalidArgumentError(f"rank must be 0..{ranks - 1}", field="rank")
    if ranks <= kv_heads:
        share = kv_heads // ranks
        return range(rank * share, (rank + 1) * share)
    first = rank // (ranks // kv_heads)
    return range(first, first + 1)


def shard_map(prefill_ranks: int, decode_ranks: int, kv_heads: int) -> tuple[Shard, ...]:
    """What is written so that each decode rank gets each of its heads exactly once, by reader and then by head.

    Where several prefill ranks are replicas of a head, its readers are shared out over them. Raises
    InvalidArgumentError like `held_heads`.
    """
    holders: list[list[int]] = [[] for _ in range(kv_heads)]
    for writer in range(prefill_ranks):
        for head in held_heads(prefill_ranks, writer, kv_heads):
            holders[head].append(writer)
    shards: list[Shard] = []
    for reader in range(decode_ranks):
        wanted = held_heads(decode_ranks, reader, kv_heads)
        for head in wanted:
            writer = holders[head][reader % len(holders[head])]
            mine = held_heads(prefill_ranks, writer, kv_heads)
            _add(shards, Shard(writer, reader, head - mine.start, head - wanted.start, 1))
    return tuple(shards)


def _add(shards: list[Shard], shard: Shard) -> None:
    """Appends one more head, or adds it to the last shard where it goes on from that."""
    last = shards[-1] if shards else None
    if last is not None and shard == replace(
        last,
        writer_head=last.writer_head + last.heads,
        reader_head=last.reader_head + last.heads,
        heads=shard.heads,
    ):
        shards[-1] = replace(last, heads=last.heads + shard.heads)
    else:
        shards.append(shard)
