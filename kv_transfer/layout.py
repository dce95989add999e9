"""Memory layout of KV blocks, whether two workers' layouts fit, and how their heads pair up. Pure.

Tensor parallelism shares the KV heads of a layer out over the ranks of a worker, as vLLM and Megatron-LM do: with up to
as many ranks as heads each rank holds the same number of neighbouring heads; with more, each head is held by the same
number of neighbouring ranks, which are replicas. `shard_map` says which rank writes which heads to which rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import kv_transfer_pb2 as pb

AXIS_ORDER = "layer,kv,head,token,dim"
HEADS_OUTERMOST = ":layer,block,head"
"""Part of an `axis_order` in which each head of a layer's piece of a block is one contiguous range, so that a piece can
be divided by heads. The part before it names the kernels that read the ranges."""
MAX_NAME = 128
"""Characters of an `axis_order` or an `engine_version`."""
ENGINE_VERSION = "1"
"""Stands for the meaning of KV (rotary order, scaling) in this project's own engines."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one KV block; see `KvLayout` in protos/splitserve/v1/kv_transfer.proto.

    A block is a contiguous `[num_layers, 2, num_kv_heads, block_size_tokens, head_dim]` array of `dtype`, so that
    one descriptor moves all layers.
    """

    model_fingerprint: str
    dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    axis_order: str = AXIS_ORDER
    tensor_parallel_size: int = 1
    engine_version: str = ENGINE_VERSION

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values."""
        token_bytes = self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.block_size_tokens * token_bytes

    @property
    def rank(self) -> KvLayout:
        """What one of the tensor-parallel ranks holds, as a layout of its own."""
        heads = max(1, self.num_kv_heads // max(1, self.tensor_parallel_size))
        return replace(self, num_kv_heads=heads, tensor_parallel_size=1)

    def require_fits(self, other: KvLayout, *, who: str) -> None:
        """Raises FailedPreconditionError (LAYOUT_MISMATCH) naming the first field that differs and must not.

        Tensor-parallel sizes may differ where pieces can be divided by heads. `who` names the owner of `other` in the
        message.
        """
        # The order first: where two engines meet, it is the reason, whatever else differs.
        for name in ("axis_order", *(f.name for f in fields(self))):
            if name == "tensor_parallel_size" and HEADS_OUTERMOST in self.axis_order:
                continue
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise FailedPreconditionError(
                    f"KV layout differs from {who} in {name}: {mine!r} here, {theirs!r} there",
                    reason="LAYOUT_MISMATCH",
                    field=name,
                )

    def to_proto(self) -> pb.KvLayout:
        """The wire form."""
        return pb.KvLayout(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: pb.KvLayout) -> KvLayout:
        """The inverse of `to_proto`."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


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
