"""Notifications from writer to owner: a completed handoff, or a writer that gives its ticket up."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kv_transfer.layout import MAX_NAME
from splitserve.v1 import kv_transfer_pb2 as pb

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
    checksum_tokens: int = 0
    """Tokens that each of the checksums before folding covers; 0: a block of the owner's."""
    axis_order: str = ""
    """The order in which the blocks were written, see `KvLayout`; empty: the owner's."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer has released the ticket without completing it; none of its writes is in flight."""

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
        checksum_tokens=message.checksum_tokens,
        axis_order=message.axis_order,
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
        if len(done.axis_order) > MAX_NAME:
            return BadNotification(f"axis_order of {len(done.axis_order)} characters, at most {MAX_NAME}")
        return WriteCompletion(
            done.epoch,
            done.reservation,
            done.written_bytes,
            done.first_token_id,
            tuple(done.checksums),
            done.checksum_tokens,
            done.axis_order,
        )
    if kind == "drained":
        return Drained(message.drained.epoch, message.drained.reservation)
    return BadNotification("neither a completion nor drained")
