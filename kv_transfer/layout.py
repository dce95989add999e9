"""Memory layout of KV blocks, and whether two workers' layouts fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from splitserve.errors import FailedPreconditionError
from splitserve.v1 import kv_transfer_pb2 as pb

AXIS_ORDER = "layer,kv,head,token,dim"
MAX_NAME = 128
"""Characters of an `axis_order` or an `engine_version`."""
ENGINE_VERSION = "1"
"""Version of the meaning of KV (rotary order, scaling) in this project's own engines."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one KV block; see `KvLayout` in protos/splitserve/v1/kv_transfer.proto.

    A block is a contiguous `[num_layers, 2, num_kv_heads, block_size_tokens, head_dim]` array of `dtype`, so that
    one descriptor moves all layers. Blocks of engine vllm are opaque: `axis_order` names the kernels that read them.
    """

    model_fingerprint: str
    dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    axis_order: str = AXIS_ORDER
    engine_version: str = ENGINE_VERSION

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values."""
        token_bytes = self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.block_size_tokens * token_bytes

    def require_fits(self, other: KvLayout, *, who: str) -> None:
        """Raises FailedPreconditionError (LAYOUT_MISMATCH) naming the first field that differs.

        `who` names the owner of `other` in the message.
        """
        # `axis_order` first: between two different engines it is the reason, whatever else differs.
        for name in ("axis_order", *(f.name for f in fields(self))):
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
