"""What the two sides of a handoff tell each other.

A ticket is the permission to write once into blocks that a decode worker reserved. The writer answers it with one
notification: the handoff is complete, or the writer gives the ticket up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from google.protobuf.message import DecodeError

from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from splitserve.v1 import kv_transfer_pb2 as pb

MAX_TIME_TO_LIVE_S = 24 * 3600.0
MAX_AGENT_ID_LENGTH = 64
FINGERPRINT_LENGTH = 64
MAX_GROUPS = 64

WRITE_GRACE_S = 5.0
"""A writer posts nothing after its ticket's deadline. Within this many seconds its earlier writes are done,
or cut off because it closes the connection."""


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The permission to write a prompt's KV once into reserved blocks: `KvTicket` of the protos.

    `deadline_s` is on this process's monotonic clock. The wire carries the remaining time, so hosts need no
    common clock; the network delay of each hop extends the deadline. A process that holds a ticket subtracts
    the holding time: `from_proto` on arrival, `to_proto` on departure.
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
    adapter_fingerprint: str = ""
    group_blocks: tuple[int, ...] = ()
    """How many of `block_indices` belong to each group of layers; empty: all to one."""

    def to_proto(self, now: float) -> pb.KvTicket:
        """The wire form with the time remaining at `now`. Raises DeadlineExceededError if none is left."""
        left_s = self.deadline_s - now
        if left_s <= 0:
            raise DeadlineExceededError(f"ticket {self.reservation} has no time left")
        message = pb.KvTicket(**_values(self))
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
        _require(
            len(message.adapter_fingerprint) in (0, FINGERPRINT_LENGTH),
            "adapter_fingerprint",
            f"empty or {FINGERPRINT_LENGTH} characters",
        )
        groups = message.group_blocks
        _require(not groups or sum(groups) == count, "group_blocks", f"{count} together, or empty")
        _require(len(groups) <= MAX_GROUPS, "group_blocks", f"at most {MAX_GROUPS}")
        _require(0 < left_s <= MAX_TIME_TO_LIVE_S, "time_to_live", "above 0 and at most 24 h")
        sequences = {"block_indices": tuple(message.block_indices), "group_blocks": tuple(groups)}
        return cls(**_values(message) | sequences, deadline_s=now + left_s)

    def require_writer(self, agent_id: str) -> None:
        """Checks that this agent may use the ticket. Raises FailedPreconditionError (TICKET_FOREIGN)."""
        if self.writer_agent_id not in ("", agent_id):
            message = f"the ticket is agent {self.writer_agent_id}'s"
            raise refused_ticket("TICKET_FOREIGN", "writer_agent_id", message)

    def require_another_owner(self, agent_id: str) -> None:
        """Checks that this agent has not reserved the blocks itself: nothing is handed off then.

        Raises FailedPreconditionError (TICKET_OWN).
        """
        if self.decode_agent_id == agent_id:
            raise refused_ticket(
                "TICKET_OWN", "decode_agent_id", "the ticket is for blocks of this very worker"
            )

    def require_adapter(self, fingerprint: str) -> None:
        """Checks that the decode worker goes on with the adapter that computes the prompt; empty: with none.

        Raises FailedPreconditionError (ADAPTER_MISMATCH).
        """
        if self.adapter_fingerprint != fingerprint:
            message = "the decode worker would go on with another adapter"
            raise refused_ticket("ADAPTER_MISMATCH", "adapter_fingerprint", message)

    def require_fits(self, memory: KvMemoryRegion) -> None:
        """Checks the ticket against its owner's memory. Raises InvalidArgumentError naming field and bound."""
        layout = memory.layout
        highest = max(self.block_indices, default=-1)
        blocks = memory.request_blocks
        _require(highest < blocks, "block_indices", f"below {blocks}, the number of the owner's blocks")
        expected = len(self.block_indices) * layout.block_bytes
        _require(self.total_bytes == expected, "total_bytes", f"{expected}, the bytes of its blocks")
        block_size = layout.block_size_tokens
        _require(self.cached_tokens % block_size == 0, "cached_tokens", f"a multiple of {block_size}")


def _values(ticket: KvTicket | pb.KvTicket) -> dict[str, Any]:
    """The fields that both forms of a ticket have: all but the deadline."""
    return {
        entry.name: getattr(ticket, entry.name) for entry in fields(KvTicket) if entry.name != "deadline_s"
    }


def refused_ticket(reason: str, name: str, message: str) -> FailedPreconditionError:
    """The error for a ticket that must not be used; `name` is the field of the ticket that says so."""
    return FailedPreconditionError(message, reason=reason, field=f"ticket.{name}")


def _require(condition: bool, name: str, bound: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"ticket.{name} must be {bound}", field=f"ticket.{name}")


MAX_NOTIFICATION_BYTES = 4096
MAX_CHECKSUMS = 64


@dataclass(frozen=True, slots=True)
class WriteCompletion:
    """All bytes of a ticket are written; `first_token_id` is the token sampled by prefill.

    `checksums` cover the blocks selected by the ticket; see `kv_transfer.handoff.checksums`.
    """

    epoch: int
    reservation: int
    written_bytes: int
    first_token_id: int
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer gives the ticket up without completing it; none of its writes is in flight."""

    epoch: int
    reservation: int


@dataclass(frozen=True, slots=True)
class BadNotification:
    """Bytes that do not decode as a notification; `problem` is a one-line reason."""

    problem: str


def encode(message: WriteCompletion | Drained) -> bytes:
    """Serializes to a `KvNotification`."""
    if isinstance(message, Drained):
        drained = pb.KvDrained(epoch=message.epoch, reservation=message.reservation)
        return pb.KvNotification(drained=drained).SerializeToString()
    completion = pb.KvCompletion(
        epoch=message.epoch,
        reservation=message.reservation,
        written_bytes=message.written_bytes,
        first_token_id=message.first_token_id,
        checksums=message.checksums,
    )
    return pb.KvNotification(completion=completion).SerializeToString()


def decode(data: bytes) -> WriteCompletion | Drained | BadNotification:
    """Decodes a notification from an untrusted peer. Never raises; bad bytes give `BadNotification`."""
    if len(data) > MAX_NOTIFICATION_BYTES:
        return BadNotification(f"{len(data)} bytes, at most {MAX_NOTIFICATION_BYTES} are read")
    try:
        message = pb.KvNotification.FromString(data)
    except DecodeError as error:
        return BadNotification(f"not a KvNotification: {error}")
    kind = message.WhichOneof("kind")
    if kind == "completion":
        done = message.completion
        if len(done.checksums) > MAX_CHECKSUMS:
            return BadNotification(f"{len(done.checksums)} checksums, at most {MAX_CHECKSUMS} are read")
        return WriteCompletion(
            done.epoch, done.reservation, done.written_bytes, done.first_token_id, tuple(done.checksums)
        )
    if kind == "drained":
        return Drained(message.drained.epoch, message.drained.reservation)
    return BadNotification("neither a completion nor drained")
