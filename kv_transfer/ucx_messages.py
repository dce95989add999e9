"""What the ucx transport says to a peer: tags, and the few small messages around the bytes.

A *caller* (writer) opens a session at an *owner* of memory with a random number. Everything is a UCX
tag-matched message; its 64-bit tag says what it is:

    4 bits kind | 32 bits session | 12 bits write | 16 bits run

Kind CALL goes from caller to owner, REPLY back, DATA is one run of blocks of one write. Nothing is
executed or unpickled: every message is a struct whose lengths are checked, and one that does not fit
raises TransferError (MALFORMED).
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum

from splitserve.errors import TransferError

MAX_RUNS = 2**16
"""Runs of one write: as many as the tag can number."""
MAX_WRITES = 2**12
"""Writes in flight in one session."""
MAX_NOTIFICATION_BYTES = 2**16
MAX_CONTROL_BYTES = 2**20
"""Longest message but DATA; an announcement of `MAX_RUNS` runs fits."""
MAX_ADDRESS_BYTES = 2**16
MAX_REASON_BYTES = 256
CONTROL_MASK = 1 << 63
"""Bit that CALL and REPLY have and DATA has not."""
ALL_BITS = 2**64 - 1
WRITE_MASK = ALL_BITS ^ (MAX_RUNS - 1)
"""All of a tag but the run."""

_CARD = struct.Struct("<4s16s32sI")
_ANNOUNCE = struct.Struct("<HIQ")
_RUN = struct.Struct("<II")
_WRITE = struct.Struct("<H")
_MAGIC = b"SSU1"


class Kind(IntEnum):
    """Who speaks."""

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
    """A tag's parts."""

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
    """Opens a session; `card` says who calls and where replies go."""

    card: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """A write: run i, `runs[i]` = (first block, count) in the owner's pool, comes as DATA number i."""

    write: int
    total_bytes: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """A notification."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Gone:
    """The sender has ended the session."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All bytes of a write can be read."""

    write: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A write was not, or not wholly, taken in."""

    write: int
    why: str


Message = Hello | Announce | Notice | Gone | Ack | Refused


def encode_card(agent_id: str, address: bytes) -> bytes:
    """A transport's metadata: agent id, UCX worker address, and a digest of both.

    UCX reads addresses without looking at their bounds. The digest keeps damaged ones away from it; it is
    no defence against a peer that lies.
    """
    agent = uuid.UUID(agent_id).bytes
    return _CARD.pack(_MAGIC, agent, hashlib.sha256(agent + address).digest(), len(address)) + address


def decode_card(card: bytes) -> tuple[str, bytes]:
    """(agent id, worker address). Raises TransferError for anything that `encode_card` did not make."""
    if len(card) < _CARD.size:
        raise malformed("metadata too short")
    magic, agent, digest, length = _CARD.unpack_from(card)
    address = card[_CARD.size :]
    if magic != _MAGIC or length != len(address) or not 0 < length <= MAX_ADDRESS_BYTES:
        raise malformed("not metadata of transport ucx")
    if hashlib.sha256(agent + address).digest() != digest:
        raise malformed("metadata is damaged")
    return str(uuid.UUID(bytes=agent)), address


def encode(message: Message) -> bytes:
    """The wire form; its first byte is the type."""
    match message:
        case Hello(card):
            return bytes([_Type.HELLO]) + card
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
    """Reads a peer's message. Raises TransferError (MALFORMED) for anything `encode` did not make."""
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
    """The error for bytes that no honest peer sends."""
    return TransferError(f"transport ucx: {what}", reason="MALFORMED")
