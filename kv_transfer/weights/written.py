"""The notification that a piece of weights has arrived."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

from splitserve.errors import TransferError


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """Piece `number` of a pull, counted from 0, lies in block `block` of the window, `count` bytes of it.

    `checksum` is the XXH3-64 of the bytes as the giver read them.
    """

    number: int
    block: int
    count: int
    checksum: int

    _FORMAT: ClassVar[struct.Struct] = struct.Struct("<4sQIIQ")
    _MAGIC: ClassVar[bytes] = b"WGT1"

    def pack(self) -> bytes:
        """The wire form."""
        return self._FORMAT.pack(self._MAGIC, self.number, self.block, self.count, self.checksum)

    @classmethod
    def unpack(cls, message: bytes) -> WrittenPiece:
        """The inverse of `pack`. Raises TransferError (WEIGHTS_MALFORMED)."""
        if len(message) != cls._FORMAT.size or not message.startswith(cls._MAGIC):
            raise TransferError("a notification of weights is malformed", reason="WEIGHTS_MALFORMED")
        _, *numbers = cls._FORMAT.unpack(message)
        return cls(*numbers)
