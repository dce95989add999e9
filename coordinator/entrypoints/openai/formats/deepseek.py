"""Calls between DeepSeek's own tokens: R1, V3 and V3.1. `invoke.py` reads later versions.

<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\\n```json\\n{"city": "Paris"}\\n```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
"""  # noqa: RUF002

from __future__ import annotations

from coordinator.entrypoints.openai.formats.reader import Reader, Steps, drop
from coordinator.entrypoints.openai.formats.tool_format import NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer

_BEGIN, _END, _CALL, _END_CALL, _SEPARATOR = (
    f"<｜tool▁{word}｜>"  # noqa: RUF001
    for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_FENCE = "```json"


def _read(reader: Reader, writer: Writer) -> Steps[bool]:
    yield from reader.blank()
    name = yield from reader.name()
    if not name or not (yield from reader.takes(_SEPARATOR)):
        return False
    if not (yield from reader.next_is("{")):  # R1 and V3 write the type of the tool before its name
        name = yield from reader.name()
        yield from reader.takes(_FENCE)
        if not name or not (yield from reader.next_is("{")):
            return False
    writer.call(name)
    yield from reader.json_value(writer.arguments)
    yield from reader.until((_END_CALL, _END), drop)
    return True


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    markers=(_CALL, _FENCE),
    opens=(_CALL,),
    skips=(_BEGIN, _END),
    read=_read,
    form=CallForm(
        begin=_BEGIN,
        head=f"{_CALL}function{_SEPARATOR}{NAME}\n{_FENCE}\n",
        tail=f"\n```{_END_CALL}",
        between="\n",
        end=_END,
    ),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    markers=(_CALL,),
    opens=(_CALL,),
    skips=(_BEGIN, _END),
    read=_read,
    form=CallForm(begin=_BEGIN, head=f"{_CALL}{NAME}{_SEPARATOR}", tail=_END_CALL, end=_END),
)
