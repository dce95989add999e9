"""Calls of Gemma 4, whose notation has names without quotes and strings between special tokens.

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
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+(?:\s+[^\s{}\[\],:\"]+)*)\s*:")


def _read(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.blank()
    name = (yield from reader.name()).removeprefix("call:")
    if not name or not (yield from reader.next_is("{")):
        return False
    pieces: list[str] = []
    # A closing tag within a string does not end the call.
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
    """An object in Gemma's notation as JSON; empty if the text is none."""
    # Every second part lies between quotes.
    parts = enumerate(written.split(_QUOTE))
    text = "".join(quoted(part) if place % 2 else _KEY.sub(_quoted_key, part) for place, part in parts)
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return ""
    return text if is_object else ""


def _quoted_key(match: re.Match[str]) -> str:
    return f"{match[1]}{quoted(match[2])}:"


GEMMA = ToolFormat(
    name="gemma",
    markers=(_CALL, _END_CALL),
    opens=(_CALL,),
    read=_read,
)
