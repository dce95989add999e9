"""Calls of Llama 3, as JSON, and of Llama 4, as a Python list. Both may be the whole answer, without a tag.

{"name": "get_weather", "parameters": {"city": "Paris"}}
[get_weather(city="Paris"), now()]
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from coordinator.entrypoints.openai.formats.json_calls import read_json_call
from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

MAX_PYTHON, MAX_ARGUMENTS = 2**15, 256
"""Most characters and arguments of a call in Python, which then parses within milliseconds; a longer one is text."""
_NAME = re.compile(r"[\w.-]*")


def _read_json(reader: Reader, writer: Writer) -> Steps[bool]:
    """Reads objects with semicolons between them."""
    is_call = yield from read_json_call(reader, writer, functions=writer.tools)
    while is_call and (yield from reader.takes(";")):
        yield from read_json_call(reader, writer, functions=writer.tools)
    return is_call


def _read_python(reader: Reader, writer: Writer) -> Steps[bool]:
    """Reads a list of calls; each is passed on when it is complete."""
    if (yield from reader.next_is("{")):
        return (yield from _read_json(reader, writer))
    if not (yield from reader.takes("[")):
        return False
    is_call = False
    while True:
        yield from reader.blank()
        name = yield from reader.name(_NAME)
        if name not in writer.tools or not (yield from reader.next_is("(")):
            return is_call
        pieces: list[str] = []
        yield from reader.json_value(pieces.append)
        arguments = _arguments("".join(pieces))
        if arguments is None:
            return is_call
        writer.call(name)
        writer.arguments(json.dumps(arguments, ensure_ascii=False))
        is_call = True
        if (yield from reader.takes(",", "]")) != ",":
            return is_call


def _arguments(written: str) -> dict[str, Any] | None:
    """The values of `(name=value, ...)`; None unless all of them are literals."""
    if len(written) > MAX_PYTHON:
        return None
    try:
        call = ast.parse(f"_{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or len(call.keywords) > MAX_ARGUMENTS:
            return None
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(values, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return values


LLAMA = ToolFormat(
    name="llama",
    markers=('"parameters": dictionary of argument name',),
    opens=("<|python_tag|>",),
    read=_read_json,
    is_bare=True,
    form=CallForm(head=f'{{"name": "{NAME}", "parameters": ', tail="}", between="; "),
)
LLAMA_PYTHONIC = ToolFormat(
    name="llama_pythonic",
    markers=("<|python_start|>",),
    opens=("<|python_start|>",),
    skips=("<|python_end|>",),
    read=_read_python,
    is_bare=True,
    form=CallForm(head=f'{{"name": "{NAME}", "parameters": ', tail="}", between="; "),
)
