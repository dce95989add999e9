"""Calls as JSON objects: Hermes, Qwen, Granite, Phi-4 and MiniMax-M1.

<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>
<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial

from coordinator.entrypoints.openai.formats.reader import Reader, Steps, drop
from coordinator.entrypoints.openai.formats.tool_format import NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

ARGUMENTS = ("arguments", "parameters")
_USUAL = frozenset({*ARGUMENTS, "name", "type", "id"})
_HEAD = f'{{"name": "{NAME}", "arguments": '


def array_form(begin: str, end: str = "") -> CallForm:
    """Calls as the objects of one JSON array, between `begin` and `end`."""
    return CallForm(begin=f"{begin}[", head=_HEAD, tail="}", between=", ", end=f"]{end}")


def no_id() -> str:
    """No id: the writer draws one."""
    return ""


def read_json_call(
    reader: Reader,
    writer: Writer,
    *,
    functions: Collection[str] | None = None,
    new_id: Callable[[], str] = no_id,
) -> Steps[bool]:
    """Reads one object with a name and arguments, in any order. Arguments are passed on as they arrive once the name is
    known.

    `functions`: the functions that may be called, where calls have no tags. There an object is a call only if it names
    one of them, has arguments and has no unusual field: it may as well be an answer in JSON.
    """
    if not (yield from reader.takes("{")):
        return False
    name = arguments = ""
    is_begun = False
    while True:
        key = yield from reader.string()
        if key is None or not (yield from reader.takes(":")):
            return is_begun
        # 1. The name.
        if key == "name" and not name:
            name = (yield from reader.string()) or ""
            if not name or (functions is not None and name not in functions):
                return False
        # 2. The whole call in an object of its own.
        elif key == "function" and not name:
            is_begun = yield from read_json_call(reader, writer, functions=functions, new_id=new_id)
        # 3. Arguments after the name.
        elif key in ARGUMENTS and name and not (is_begun or arguments) and (yield from reader.next_is("{")):
            is_begun = True
            writer.call(name, new_id())
            if not (yield from reader.json_value(writer.arguments)):
                return True
        # 4. Arguments before the name, or another field.
        else:
            pieces: list[str] = []
            is_usual = functions is None or key in _USUAL
            if not (is_usual and (yield from reader.json_value(pieces.append))):
                return is_begun
            arguments = "".join(pieces) if key in ARGUMENTS else arguments
        if (yield from reader.takes(",", "}")) != ",":
            break
    if not is_begun and name and (arguments or functions is None):
        is_begun = True
        writer.call(name, new_id())
        writer.arguments(_object_text(arguments))
    return is_begun


def read_json_calls(reader: Reader, writer: Writer, *, new_id: Callable[[], str] = no_id) -> Steps[bool]:
    """Reads one call, or an array of calls."""
    is_array = yield from reader.takes("[")
    is_call = yield from read_json_call(reader, writer, new_id=new_id)
    while is_array and (yield from reader.takes(",", "]")) == ",":
        yield from read_json_call(reader, writer, new_id=new_id)
    return is_call


def _object_text(written: str) -> str:
    """The arguments as an object's JSON. Some models write the object as a string, or null without arguments."""
    try:
        value = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written
    return value if isinstance(value, str) else "{}" if value is None else written or "{}"


def _read_between(begin: str, end: str, reader: Reader, writer: Writer) -> Steps[bool]:
    """Reads calls up to the closing tag. Some models leave it out before the next opening tag."""
    while (yield from read_json_calls(reader, writer)):
        if not (yield from reader.next_is("{")) and (yield from reader.until((end, begin), drop)) == end:
            return True
    return False


HERMES = ToolFormat(
    name="hermes",
    markers=("<tool_call>",),
    opens=("<tool_call>",),
    read=partial(_read_between, "<tool_call>", "</tool_call>"),
    form=CallForm(head=f"<tool_call>\n{_HEAD}", tail="}\n</tool_call>", between="\n"),
)
MINIMAX_M1 = ToolFormat(
    name="minimax_m1",
    markers=("<tool_calls>",),
    opens=("<tool_calls>",),
    read=partial(_read_between, "<tool_calls>", "</tool_calls>"),
    form=CallForm(begin="<tool_calls>\n", head=_HEAD, tail="}\n", end="</tool_calls>"),
)
GRANITE = ToolFormat(
    name="granite",
    markers=("<|tool_call|>", "<|start_of_role|>"),
    opens=("<|tool_call|>", "<tool_call>"),
    read=read_json_calls,
    form=array_form("<|tool_call|>"),
)
PHI4 = ToolFormat(
    name="phi4",
    markers=("<|tool|>",),
    opens=("<|tool_call|>", "functools"),
    skips=("<|/tool_call|>",),
    read=read_json_calls,
    form=array_form("<|tool_call|>", "<|/tool_call|>"),
)
