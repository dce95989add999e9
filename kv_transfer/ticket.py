"""The right to write once into blocks that a decode worker reserved."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.transport import PoolMemory
from splitserve.errors import DeadlineExceededError, InvalidArgumentError
from splitserve.v1 import kv_transfer_pb2 as pb

MAX_TIME_TO_LIVE_S = 24 * 3600.0
MAX_AGENT_ID_LENGTH = 64

WRITE_GRACE_S = 5.0
"""A writer posts nothing after its ticket's deadline, and what it posted before is over, or cut off by
closing its side of the connection, within this many seconds more."""


@dataclass(frozen=True, slots=True)
class KvTicket:
    """See `KvTicket` in protos/splitserve/v1/kv_transfer.proto.

    `deadline_s` is on this process's monotonic clock: the wire carries the time left, so that clocks need
    not agree. Each hop adds its own delay to the deadline, which is why whoever forwards a ticket late
    must subtract the time it kept it (`from_proto` on arrival, `to_proto` on departure).
    """

    decode_agent_id: str
    epoch: int
    reservation: int
    block_indices: tuple[int, ...]
    cached_tokens: int
    total_bytes: int
    deadline_s: float
    writer_agent_id: str = ""
    verify_one_in: int = 0

    def to_proto(self, now: float) -> pb.KvTicket:
        """The wire form with the time left at `now`. Raises DeadlineExceededError when none is."""
        left_s = self.deadline_s - now
        if left_s <= 0:
            raise DeadlineExceededError(f"ticket {self.reservation} has no time left")
        message = pb.KvTicket(
            decode_agent_id=self.decode_agent_id,
            epoch=self.epoch,
            reservation=self.reservation,
            block_indices=self.block_indices,
            cached_tokens=self.cached_tokens,
            total_bytes=self.total_bytes,
            writer_agent_id=self.writer_agent_id,
            verify_one_in=self.verify_one_in,
        )
        message.time_to_live.FromNanoseconds(max(1, int(left_s * 1e9)))
        return message

    @classmethod
    def from_proto(cls, message: pb.KvTicket, now: float) -> KvTicket:
        """The inverse of `to_proto`. Raises InvalidArgumentError naming the first bad field and its bound."""
        left_s = message.time_to_live.seconds + message.time_to_live.nanos / 1e9
        count = len(message.block_indices)
        id_length = len(message.decode_agent_id)
        id_bound = f"1 to {MAX_AGENT_ID_LENGTH} characters"
        _require(0 < id_length <= MAX_AGENT_ID_LENGTH, "decode_agent_id", id_bound)
        writer_length = len(message.writer_agent_id)
        _require(
            writer_length <= MAX_AGENT_ID_LENGTH, "writer_agent_id", f"at most {MAX_AGENT_ID_LENGTH} long"
        )
        _require(message.epoch > 0, "epoch", "not 0")
        _require(message.reservation > 0, "reservation", "not 0")
        _require(len(set(message.block_indices)) == count, "block_indices", "distinct")
        size = message.total_bytes
        fits = size > 0 and size % count == 0 if count else size == 0
        _require(fits, "total_bytes", "the number of blocks times the size of a block")
        _require(0 < left_s <= MAX_TIME_TO_LIVE_S, "time_to_live", "above 0 and at most 24 h")
        return cls(
            decode_agent_id=message.decode_agent_id,
            epoch=message.epoch,
            reservation=message.reservation,
            block_indices=tuple(message.block_indices),
            cached_tokens=message.cached_tokens,
            total_bytes=size,
            deadline_s=now + left_s,
            writer_agent_id=message.writer_agent_id,
            verify_one_in=message.verify_one_in,
        )

    def require_fits(self, pool: PoolMemory) -> None:
        """Checks the ticket against its owner's pool. Raises InvalidArgumentError naming the field."""
        layout = pool.layout
        highest = max(self.block_indices, default=-1)
        blocks = pool.request_blocks
        _require(highest < blocks, "block_indices", f"below {blocks}, the pool's blocks")
        expected = len(self.block_indices) * layout.block_bytes
        _require(self.total_bytes == expected, "total_bytes", f"{expected}, the bytes of its blocks")
        block_size = layout.block_size_tokens
        _require(self.cached_tokens % block_size == 0, "cached_tokens", f"a multiple of {block_size}")


def _require(condition: bool, name: str, bound: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"ticket.{name} must be {bound}", field=f"ticket.{name}")
