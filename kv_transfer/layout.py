"""How KV blocks lie in memory, and whether two workers' blocks fit each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from splitserve.errors import FailedPreconditionError
from splitserve.v1 import kv_transfer_pb2 as pb

AXIS_ORDER = "layer,kv,head,token,dim"
ENGINE_VERSION = "1"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SAME, FP8_E4M3 = "same", "fp8_e4m3"
WIRE_DTYPES = (SAME, FP8_E4M3)
NO_QUANTIZATION = "none"
QUANTIZATIONS = (NO_QUANTIZATION, "int8")
"""How the weights that make the KV are kept. KV of others is not what this worker would have computed."""
SCALE_BYTES = 2
"""A bfloat16 scale for each vector that travels as fp8."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one KV block; see `KvLayout` in protos/splitserve/v1/kv_transfer.proto.

    A block is `[num_layers, 2, num_kv_heads, block_size_tokens, head_dim]` elements of `dtype`,
    contiguous, so that one descriptor moves all layers of a block. With `wire_dtype` "fp8_e4m3" it is what
    travels instead of that: two bytes for the scale of each vector of `head_dim` elements, all of them first, then
    one byte for each element, both in the axes' order; see `engine.fp8_wire`.
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
        """Key and value vectors of one block, `head_dim` elements each."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with all its layers, keys and values, scales included."""
        if self.wire_dtype == FP8_E4M3:
            return self.block_vectors * (SCALE_BYTES + self.head_dim)
        return self.block_vectors * self.head_dim * DTYPE_BYTES[self.dtype]

    def require_equal(self, other: KvLayout, *, who: str) -> None:
        """Raises FailedPreconditionError (LAYOUT_MISMATCH) naming the first unequal field.

        `who` names the owner of `other` in the message.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                raise FailedPreconditionError(
                    f"KV layout differs from {who} in {f.name}: {mine!r} here, {theirs!r} there",
                    reason="LAYOUT_MISMATCH",
                    field=f.name,
                )

    def to_proto(self) -> pb.KvLayout:
        """The wire form."""
        return pb.KvLayout(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: pb.KvLayout) -> KvLayout:
        """The inverse of `to_proto`."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
