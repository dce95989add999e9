"""Which bytes a vocabulary's entry stands for: the two spellings in use, GPT-2's and SentencePiece's."""

from __future__ import annotations

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""How SentencePiece writes a space."""


def entry_bytes(entry: str, *, byte_level: bool) -> bytes:
    """The bytes of an entry as the vocabulary spells it.

    `byte_level`: each character is one byte in GPT-2's alphabet. Else the entry is text with `SPACE` for spaces,
    or one byte as "<0x0A>".
    """
    if byte_level:
        alphabet = _alphabet()
        if all(character in alphabet for character in entry):
            return bytes(alphabet[character] for character in entry)
        return entry.encode()
    if byte := _BYTE.fullmatch(entry):
        return bytes.fromhex(byte[1])
    return entry.replace(SPACE, " ").encode()


@cache
def _alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are their own bytes, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
