"""How KV blocks lie in memory, and whether two workers' blocks fit each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from splitserve.errors import FailedPreconditionError
from splitserve.v1 import kv_transfer_pb2 as pb

AXIS_ORDER = "layer,kv,head,token,dim"
ENGINE_VERSION = "1"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one KV block; see `KvLayout` in protos/splitserve/v1/kv_transfer.proto.

    A block is `[num_layers, 2, num_kv_heads, block_size_tokens, head_dim]` elements of `dtype`,
    contiguous, so that one descriptor moves all layers of a block.
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
        """Bytes of one block with all its layers, keys and values."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size_tokens * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

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
