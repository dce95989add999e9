"""Wire format of the ucx transport: tags and control messages.

A *caller* (writer) opens a session with a random number at the *owner* of the memory. All traffic is UCX
tag-matched messages with 64-bit tags:

    4 bits kind | 32 bits session | 12 bits write | 16 bits run

CALL messages go from caller to owner, REPLY messages back; a DATA message is one run of blocks of one write.
Control messages are structs with checked lengths, never pickles; one that does not parse raises
TransferError (MALFORMED).
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum

from splitserve.errors import TransferError

MAX_RUNS = 2**16
"""Maximum number of runs of one write, limited by the tag's 16 bits."""
MAX_WRITES = 2**12
"""Numbers of writes in one session, limited by the tag's 12 bits."""
MAX_RESENT = 32
"""Maximum number of replies that an owner sends again, over another connection."""
MAX_FLIGHTS = MAX_WRITES - MAX_RESENT - 1
"""Maximum number of writes in flight in one session, such that a reply sent again never meets a later write of the same
number."""
MAX_NOTIFICATION_BYTES = 2**16
MAX_CONTROL_BYTES = 2**20
"""Maximum size of a control message; large enough for an `Announce` of `MAX_RUNS` runs."""
MAX_ADDRESS_BYTES = 2**16
MAX_REASON_BYTES = 256
CONTROL_MASK = 1 << 63
"""The bit that is set in the kinds CALL and REPLY but not in DATA."""
ALL_BITS = 2**64 - 1
WRITE_MASK = ALL_BITS ^ (MAX_RUNS - 1)
"""All bits of a tag except the run."""

_METADATA = struct.Struct("<4s16s32sI")
_ANNOUNCE = struct.Struct("<HIQ")
_RUN = struct.Struct("<II")
_WRITE = struct.Struct("<H")
_MAGIC = b"SSU1"


class Kind(IntEnum):
    """Kind of a message."""

    DATA = 1
    CALL = 8
    REPLY = 9


class _Type(IntEnum):
    HELLO = 1
    ANNOUNCE = 2
    NOTICE = 3
    GONE = 4
    ACK = 5
    REFUSED = 6


@dataclass(frozen=True, slots=True)
class Tag:
    """The parts of a tag."""

    kind: int
    session: int
    write: int = 0
    run: int = 0

    @property
    def value(self) -> int:
        """The 64-bit number."""
        return self.kind << 60 | self.session << 28 | self.write << 16 | self.run

    @classmethod
    def parse(cls, value: int) -> Tag:
        """The inverse of `value`."""
        return cls(value >> 60, value >> 28 & 0xFFFFFFFF, value >> 16 & 0xFFF, value & 0xFFFF)


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session; `metadata` has the caller's agent id and the address for replies."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Announces a write: run i, `runs[i]` = (first block, count) in the owner's memory, follows as DATA run i."""

    write: int
    total_bytes: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """A notification."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Gone:
    """The sender has closed the session."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All bytes of a write are readable."""

    write: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A write was not, or only partially, received."""

    write: int
    why: str


Message = Hello | Announce | Notice | Gone | Ack | Refused


def encode_metadata(agent_id: str, address: bytes) -> bytes:
    """Packs a transport's metadata: agent id, UCX worker address and a digest of both.

    UCX parses addresses without bounds checks. The digest keeps damaged ones away from it but does not protect
    against a malicious peer.
    """
    agent = uuid.UUID(agent_id).bytes
    return _METADATA.pack(_MAGIC, agent, hashlib.sha256(agent + address).digest(), len(address)) + address


def decode_metadata(metadata: bytes) -> tuple[str, bytes]:
    """(agent id, worker address). Raises TransferError for anything not made by `encode_metadata`."""
    if len(metadata) < _METADATA.size:
        raise malformed("metadata too short")
    magic, agent, digest, length = _METADATA.unpack_from(metadata)
    address = metadata[_METADATA.size :]
    if magic != _MAGIC or length != len(address) or not 0 < length <= MAX_ADDRESS_BYTES:
        raise malformed("not metadata of transport ucx")
    if hashlib.sha256(agent + address).digest() != digest:
        raise malformed("metadata is damaged")
    return str(uuid.UUID(bytes=agent)), address


def encode(message: Message) -> bytes:
    """Serializes a message; its first byte is the type."""
    match message:
        case Hello(metadata):
            return bytes([_Type.HELLO]) + metadata
        case Announce(write, total, runs):
            packed = b"".join(_RUN.pack(first, count) for first, count in runs)
            return bytes([_Type.ANNOUNCE]) + _ANNOUNCE.pack(write, len(runs), total) + packed
        case Notice(data):
            return bytes([_Type.NOTICE]) + data
        case Gone():
            return bytes([_Type.GONE])
        case Ack(write):
            return bytes([_Type.ACK]) + _WRITE.pack(write)
        case Refused(write, why):
            return bytes([_Type.REFUSED]) + _WRITE.pack(write) + why.encode()[:MAX_REASON_BYTES]


def decode(data: bytes) -> Message:
    """Parses a peer's message. Raises TransferError (MALFORMED) for anything not made by `encode`."""
    if not data or data[0] not in set(_Type):
        raise malformed("unknown message")
    kind, body = _Type(data[0]), data[1:]
    if kind is _Type.HELLO:
        return Hello(body)
    if kind is _Type.ANNOUNCE:
        return _decode_announce(body)
    if kind is _Type.NOTICE:
        if not 0 < len(body) <= MAX_NOTIFICATION_BYTES:
            raise malformed(f"a notification of {len(body)} bytes")
        return Notice(body)
    if kind is _Type.GONE:
        return Gone()
    if len(body) < _WRITE.size or len(body) > _WRITE.size + MAX_REASON_BYTES:
        raise malformed(f"a reply of {len(body)} bytes")
    (write,) = _WRITE.unpack_from(body)
    if kind is _Type.ACK:
        return Ack(write)
    return Refused(write, body[_WRITE.size :].decode(errors="replace"))


def _decode_announce(body: bytes) -> Announce:
    if len(body) < _ANNOUNCE.size:
        raise malformed("an announcement too short")
    write, count, total = _ANNOUNCE.unpack_from(body)
    if write >= MAX_WRITES or not 0 < count <= MAX_RUNS or len(body) != _ANNOUNCE.size + count * _RUN.size:
        raise malformed("an announcement whose lengths do not fit")
    return Announce(write, total, tuple(_RUN.iter_unpack(body[_ANNOUNCE.size :])))


def malformed(what: str) -> TransferError:
    """The error for bytes that no correct peer sends."""
    return TransferError(f"transport ucx: {what}", reason="MALFORMED")
