"""Memory layout of KV blocks, and whether two workers' layouts are compatible."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from splitserve.errors import FailedPreconditionError
from splitserve.v1 import kv_transfer_pb2 as pb

AXIS_ORDER = "layer,kv,head,token,dim"
HEADS_OUTERMOST = ":layer,block,head"
"""Part of an `axis_order` in which each head of a layer's piece of a block is one contiguous range, so that a piece can
be divided by heads. What precedes names who reads the ranges; what follows, the order in a range, which is otherwise
opaque."""
KEYS_BY_DIM = f"cpu{HEADS_OUTERMOST},keys[dim,token],values[token,dim]"
"""The `axis_order` of vLLM's kernels on cpu in float32 and bfloat16, but for `amx`: each head's keys in a block are
transposed, then its values follow in the order of tokens."""
CONVERTED_ORDERS = frozenset({AXIS_ORDER, KEYS_BY_DIM})
"""Orders of known elements. A worker with one of them takes blocks that were written in another and puts them into its
own order when all have arrived; see docs/decisions/0027-what-engines-must-have-in-common.md."""
MAX_NAME = 128
"""Characters of an `axis_order` or an `engine_version`."""
_TOKENS_IN_ORDER = ",token,dim"
"""End of an `axis_order` in which the vectors of a head's keys, and those of its values, lie in the order of tokens, so
that workers with different block sizes may hand KV to each other."""
_BETWEEN_ORDERS = "; blocks in another axis_order are taken where all else is equal"
ENGINE_VERSION = "1"
"""Stands for the meaning of KV (rotary order, scaling) in all engines whose `axis_order` is in `CONVERTED_ORDERS`."""
INT8 = "int8"
"""KV dtype with a scale for each vector; see `engine.kv_cache.int8_kv`."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, INT8: 1}
SAME, FP8_E4M3 = "same", "fp8_e4m3"
WIRE_DTYPES = (SAME, FP8_E4M3)
NO_QUANTIZATION = "none"
QUANTIZATIONS = (NO_QUANTIZATION, "int8")
"""Weight quantizations. Workers with different ones compute different KV and must not exchange it."""
SCALE_BYTES = 2
"""Size of the bfloat16 scale of each fp8 vector on the wire, and of each int8 vector."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one KV block; see `KvLayout` in protos/splitserve/v1/kv_transfer.proto.

    A block is a contiguous `[num_layers, 2, num_kv_heads, block_size_tokens, head_dim]` array of `dtype`, so that
    one descriptor moves all layers. With `wire_dtype` "fp8_e4m3" a block on the wire is instead all vectors' scales
    (bfloat16, one for each `head_dim` elements), then one byte per element, both in axis order; see
    `engine.runner.fp8_wire`. With `dtype` "int8" each layer's piece is its `[2, num_kv_heads, block_size_tokens,
    head_dim]` codes, then their scales, bfloat16 `[2, num_kv_heads, block_size_tokens]`.
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
    wire_dtype: str = SAME
    quantization: str = NO_QUANTIZATION

    @property
    def block_vectors(self) -> int:
        """Number of key and value vectors in a block, `head_dim` elements each."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire: all layers, keys and values, and scales if any."""
        if self.wire_dtype == FP8_E4M3:
            return self.block_vectors * (SCALE_BYTES + self.head_dim)
        scale_bytes = SCALE_BYTES if self.dtype == INT8 else 0
        return self.block_vectors * (self.token_bytes + scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key, or value, of one head in one layer, without its scale if it has one."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def rank(self) -> KvLayout:
        """What one of the tensor-parallel ranks holds, as a layout of its own."""
        heads = max(1, self.num_kv_heads // max(1, self.tensor_parallel_size))
        return replace(self, num_kv_heads=heads, tensor_parallel_size=1)

    def require_fits(self, other: KvLayout, *, who: str) -> None:
        """Raises FailedPreconditionError (LAYOUT_MISMATCH) naming the first field that differs and must not.

        Tensor-parallel sizes may differ where pieces can be divided by heads, and block sizes where one divides the
        other and blocks can be divided by tokens. Orders may differ if both are in `CONVERTED_ORDERS`; then nothing
        else may, and both sides have one rank. `who` names the owner of `other` in the message.
        """
        if self == other:
            return
        if self.is_converted_for(other):
            free = {"axis_order"}
        else:
            free = {"block_size_tokens"}
            if HEADS_OUTERMOST in self.axis_order:
                free.add("tensor_parallel_size")
        # The order first: between engines it is why KV does not fit, whatever else they make differently.
        for name in ("axis_order", *(f.name for f in fields(self))):
            if name not in free:
                why = _BETWEEN_ORDERS if "axis_order" in free else ""
                self._require_equal(name, other, who, why)
        if "axis_order" in free and self.dtype == INT8:
            raise FailedPreconditionError(
                f"KV layout: blocks of dtype {INT8!r} are not put into another axis_order, and {who} has one",
                reason="LAYOUT_MISMATCH",
                field="axis_order",
            )
        if "axis_order" in free and (self.tensor_parallel_size != 1 or self.wire_dtype != SAME):
            field = "tensor_parallel_size" if self.tensor_parallel_size != 1 else "wire_dtype"
            raise FailedPreconditionError(
                f"KV layout: {field} is {getattr(self, field)!r} here and at {who}{_BETWEEN_ORDERS}, with one rank and "
                f"wire_dtype {SAME!r}",
                reason="LAYOUT_MISMATCH",
                field=field,
            )
        if self.block_size_tokens != other.block_size_tokens:
            self._require_divisible(other, who)

    def is_converted_for(self, other: KvLayout) -> bool:
        """Whether blocks have to be put into another order between the two, by whoever receives them."""
        return self.axis_order != other.axis_order and {self.axis_order, other.axis_order} <= CONVERTED_ORDERS

    def _require_divisible(self, other: KvLayout, who: str) -> None:
        """Raises unless blocks of one size can be divided into those of the other."""
        small, large = sorted((self.block_size_tokens, other.block_size_tokens))
        if small < 1 or large % small:
            why = "; one must divide the other"
        elif not self.axis_order.endswith(_TOKENS_IN_ORDER):
            why = f"; blocks of axis_order {self.axis_order!r} cannot be divided by tokens"
        elif self.wire_dtype != SAME:
            why = f"; blocks of wire_dtype {self.wire_dtype!r} cannot be divided by tokens"
        elif self.dtype == INT8:
            why = f"; blocks of dtype {self.dtype!r} cannot be divided by tokens"
        else:
            return
        self._require_equal("block_size_tokens", other, who, why)

    def _require_equal(self, name: str, other: KvLayout, who: str, why: str) -> None:
        mine, theirs = getattr(self, name), getattr(other, name)
        if mine != theirs:
            raise FailedPreconditionError(
                f"KV layout differs from {who} in {name}: {mine!r} here, {theirs!r} there{why}",
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
