"""The messages that ride on transfers: a completion, or a writer that lets go without one."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from splitserve.v1 import kv_transfer_pb2 as pb

MAX_NOTIFICATION_BYTES = 4096
MAX_CHECKSUMS = 64


@dataclass(frozen=True, slots=True)
class Completion:
    """All bytes of a ticket are written; `first_token_id` is the token that prefill sampled.

    `checksums` are those of the blocks that the ticket asks for; see `kv_transfer.verify`.
    """

    epoch: int
    reservation: int
    written_bytes: int
    first_token_id: int
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer has let go of a ticket without completing it; nothing of it is in flight."""

    epoch: int
    reservation: int


@dataclass(frozen=True, slots=True)
class BadNotification:
    """Bytes that are no notification; `problem` says why, in one line."""

    problem: str


def encode(message: Completion | Drained) -> bytes:
    """The wire form, a serialized `KvNotification`."""
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


def decode(data: bytes) -> Completion | Drained | BadNotification:
    """Reads a notification from an untrusted peer. Never raises for bad bytes."""
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
        checksums = tuple(done.checksums)
        return Completion(done.epoch, done.reservation, done.written_bytes, done.first_token_id, checksums)
    if kind == "drained":
        return Drained(message.drained.epoch, message.drained.reservation)
    return BadNotification("neither a completion nor drained")
