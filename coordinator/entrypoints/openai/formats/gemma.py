"""Calls of Gemma 4, in a notation of its own: names without quotes, strings between tokens.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import json
import re

from coordinator.entrypoints.openai.formats.arguments import quoted
from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

_CALL, _END_CALL, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+(?:\s+[^\s{}\[\],:\"]+)*)\s*:")


def _read(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.blank()
    name = (yield from reader.name(_NAME)).removeprefix("call:")
    if not name or not (yield from reader.next_is("{")):
        return False
    pieces: list[str] = []
    # Whatever is in a string ends no call: only outside of strings is a closing tag one.
    while (yield from reader.until((_QUOTE, _END_CALL), pieces.append)) == _QUOTE:
        text, _ = yield from reader.collect(_QUOTE)
        pieces.append(_QUOTE + text + _QUOTE)
    arguments = _json("".join(pieces).strip())
    if not arguments:
        return False
    writer.call(name)
    writer.arguments(arguments)
    return True


def _json(written: str) -> str:
    """The notation as JSON; empty if it is none. Every other part between quotes is a string."""
    parts = written.split(_QUOTE)
    for place, part in enumerate(parts):
        parts[place] = quoted(part) if place % 2 else _KEY.sub(_quoted_key, part)
    text = "".join(parts)
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return ""
    return text if is_object else ""


def _quoted_key(found: re.Match[str]) -> str:
    return f"{found[1]}{quoted(found[2])}:"


GEMMA = ToolFormat(
    name="gemma",
    markers=(_CALL, _END_CALL),
    opens=(_CALL,),
    read=_read,
)
