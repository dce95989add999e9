"""Calls of Kimi. K2 writes an id that contains the function's name, then JSON; K3 writes an element for each argument.

<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>...
"""

from __future__ import annotations

import html
import re

from coordinator.entrypoints.openai.formats.reader import ATTRIBUTE, Reader, Steps, drop
from coordinator.entrypoints.openai.formats.tool_format import NAME, NUMBER, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"[^\s<>]*")
_ARGUMENT = '<|open|>argument key="'


def _read_k2(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.blank()
    call_id = yield from reader.name(_ID)
    name = call_id.removeprefix("functions.").partition(":")[0]
    if not name or not (yield from reader.takes(_ARGUMENTS)) or not (yield from reader.next_is("{")):
        return False
    # In the next turn the template shows this id to the model.
    writer.call(name, call_id if ":" in call_id else "")
    yield from reader.json_value(writer.arguments)
    yield from reader.until((_END_CALL, _END), drop)
    return True


def _read_k3(reader: Reader, writer: Writer) -> Steps[bool]:
    name = yield from reader.name(ATTRIBUTE)
    if not name or not (yield from reader.takes('"')):
        return False
    yield from reader.until(("<|sep|>",), drop)
    writer.call(html.unescape(name))
    ends = (_close("call"), _close("tools"))
    while (yield from reader.takes(_ARGUMENT, *ends)) == _ARGUMENT:
        key, _ = yield from reader.collect('"')
        attributes, _ = yield from reader.collect("<|sep|>")
        text = yield from reader.value(_close("argument"), (_ARGUMENT, *ends))
        writer.argument(html.unescape(key), text, is_json='type="string"' not in attributes)
    writer.end_arguments()
    return True


def _open(element: str) -> str:
    return f"<|open|>{element}<|sep|>"


def _close(element: str) -> str:
    return f"<|close|>{element}<|sep|>"


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    markers=(_CALL,),
    opens=(_CALL,),
    skips=(_BEGIN, _END),
    read=_read_k2,
    form=CallForm(
        begin=_BEGIN,
        head=f"{_CALL}functions.{NAME}:{NUMBER}{_ARGUMENTS}",
        tail=_END_CALL,
        end=_END,
    ),
)
KIMI_K3 = ToolFormat(
    name="kimi_k3",
    markers=("<|open|>", "<|sep|>"),
    opens=('<|open|>call tool="',),
    skips=(*map(_open, ("response", "tools")), *map(_close, ("response", "tools", "message"))),
    read=_read_k3,
)
