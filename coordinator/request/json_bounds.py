"""Bounds of a JSON text, checked before it is parsed.

A parser allocates an object for every two or three bytes of `[[],[],...` and holds the interpreter's lock meanwhile.
Counting the characters between values keeps no objects, and lets other threads run after every 64 KiB.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from splitserve.errors import InvalidArgumentError
from splitserve.runtime.call_thread import SHORT_BYTES

MAX_CONTAINERS = 2**15
"""Most objects and arrays."""
MAX_KEYS = 2**15
"""Most keys of all objects together."""
MAX_VALUES = 2**18
"""Most values; more if a model's context holds more tokens. A text at any of these bounds is parsed in 15 ms."""
SLICE_BYTES = 64 * 2**10
_KEPT = b'",:[{'
_DROPPED = bytes(byte for byte in range(256) if byte not in _KEPT)


def parsed_json(text: str) -> Any:
    """The JSON value. Raises ValueError for other text, InvalidArgumentError (TOO_MANY_VALUES) as `check_structure`."""
    if len(text) > SHORT_BYTES:
        check_structure(text.encode())
    return from_json(text, allow_inf_nan=False)


def check_structure(body: bytes, most_values: int = MAX_VALUES) -> None:
    """Raises InvalidArgumentError (TOO_MANY_VALUES) naming the bound.

    Text that is no JSON is left to the parser, which stops at the first error.
    """
    containers = keys = values = 0
    inside, carried = False, b""
    for start in range(0, len(body), SLICE_BYTES):
        piece = carried + body[start : start + SLICE_BYTES]
        # Backslashes at the end of a piece go with the next one, so that no escape is split.
        whole = piece.rstrip(b"\\")
        carried = piece[len(whole) :]
        # Pairs of backslashes are removed first: a backslash that remains before a quote escapes it.
        bare = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
        spans = bare.translate(None, _DROPPED).split(b'"')
        outside = b"".join(spans[inside::2])
        inside ^= len(spans) % 2 == 0
        containers += outside.count(b"[") + outside.count(b"{")
        keys += outside.count(b":")
        values += outside.count(b",")
        _at_most("objects and arrays", containers, MAX_CONTAINERS)
        _at_most("keys", keys, MAX_KEYS)
        _at_most("values", containers + values, max(MAX_VALUES, most_values))


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        message = f"the request's body has more than {most} {what}"
        raise InvalidArgumentError(message, reason="TOO_MANY_VALUES")
