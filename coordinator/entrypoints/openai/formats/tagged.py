"""Calls with tags around each argument, whose text is not escaped: Qwen3-Coder, Qwen3.5, GLM-4.5 and later.

<tool_call>\\n<function=get_weather>\\n<parameter=city>\\nParis\\n</parameter>\\n</function>\\n</tool_call>
<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
"""

from __future__ import annotations

from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import KEY, NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"


def _read_qwen(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.takes(_FUNCTION)  # already taken if this tag has opened the call
    name = yield from reader.name()
    if not name or not (yield from reader.takes(">")):
        return False
    writer.call(name)
    tag = yield from reader.takes(_PARAMETER, _END_FUNCTION)
    while tag == _PARAMETER:
        key, _ = yield from reader.collect(">")
        text, tag = yield from _read_parameter(reader)
        writer.argument(key, text)
        tag = tag or (yield from reader.takes(_PARAMETER, _END_FUNCTION))
    writer.end_arguments()
    yield from reader.takes(_END_CALL)
    return True


def _read_parameter(reader: Reader) -> Steps[tuple[str, str]]:
    """The text of a parameter without the line ends around it, and the tag after it if that has been taken."""
    if not (yield from reader.sees("\n")):
        return (yield from reader.value(_END_PARAMETER, (_PARAMETER, _END_FUNCTION))), ""
    # A text on lines of its own ends at a line that begins with a tag. Some models forget the closing tag.
    ends = (f"\n{_END_PARAMETER}", f"\n{_PARAMETER}", f"\n{_END_FUNCTION}")
    text, tag = yield from reader.collect(*ends)
    text = text.removeprefix("\n")
    if tag == ends[0]:
        return text, ""
    return text.removesuffix(_END_PARAMETER), tag.removeprefix("\n")


def _read_glm(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.blank()
    name = yield from reader.name()
    tag = (yield from reader.takes(_KEY, _END_CALL)) if name else ""
    if not tag:
        return False
    writer.call(name)
    while tag == _KEY:
        key, _ = yield from reader.collect(_END_KEY)
        if not (yield from reader.takes(_VALUE)):
            return True
        writer.argument(key.strip(), (yield from reader.value(_END_VALUE, (_KEY, _END_CALL))))
        tag = yield from reader.takes(_KEY, _END_CALL)
    writer.end_arguments()
    return True


QWEN_XML = ToolFormat(
    name="qwen_xml",
    markers=(_FUNCTION, _PARAMETER),
    opens=(_CALL, _FUNCTION),
    read=_read_qwen,
    form=CallForm(
        head=f"{_CALL}\n{_FUNCTION}{NAME}>\n",
        tail=f"{_END_FUNCTION}\n{_END_CALL}",
        between="\n",
        argument=(f"{_PARAMETER}{KEY}>\n", f"\n{_END_PARAMETER}\n"),
    ),
)
GLM = ToolFormat(
    name="glm",
    markers=(_KEY, _VALUE),
    opens=(_CALL,),
    read=_read_glm,
    form=CallForm(
        head=f"{_CALL}{NAME}",
        tail=_END_CALL,
        argument=(f"{_KEY}{KEY}{_END_KEY}{_VALUE}", _END_VALUE),
    ),
)
