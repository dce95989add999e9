"""Calls of Mistral's models: Magistral, Ministral and Devstral.

[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

import random
import string

from coordinator.entrypoints.openai.formats.json_calls import array_form, read_json_calls
from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LETTERS = string.ascii_letters + string.digits


def _new_id() -> str:
    """An id of nine letters and digits: the chat template refuses other ones in the next turn."""
    return "".join(random.choices(_ID_LETTERS, k=9))


def _read(reader: Reader, writer: Writer) -> Steps[bool]:
    if (yield from reader.next_is("[")):
        return (yield from read_json_calls(reader, writer, new_id=_new_id))
    name = yield from reader.name()
    if not name:
        return False
    call_id = ""
    if (yield from reader.takes(_ID)):
        call_id = yield from reader.name()
    yield from reader.takes(_ARGUMENTS)
    if not (yield from reader.next_is("{")):
        return False
    writer.call(name, call_id or _new_id())
    yield from reader.json_value(writer.arguments)
    return True


MISTRAL = ToolFormat(
    name="mistral",
    markers=(_CALLS, _ARGUMENTS),
    opens=(_CALLS,),
    read=_read,
    form=CallForm(head=f"{_CALLS}{NAME}{_ARGUMENTS}", tail=""),
)
MISTRAL_V3 = ToolFormat(
    name="mistral_v3",
    markers=(_CALLS,),
    opens=(_CALLS,),
    read=_read,
    form=array_form(_CALLS),
)
