"""Calls as `invoke` elements with a `parameter` element for each argument: MiniMax-M2, and DeepSeek from V3.2 on.

    <minimax:tool_call><invoke name="f"><parameter name="city">Paris</parameter></invoke></minimax:tool_call>

DeepSeek's tags begin with a word of their own. Its parameters have an attribute `string`: whether the text is a string
or JSON.
"""

from __future__ import annotations

from functools import partial

from coordinator.entrypoints.openai.formats.reader import ATTRIBUTE, Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import KEY, KIND, NAME, CallForm, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Writer


def _read(word: str, reader: Reader, writer: Writer) -> Steps[bool]:
    """Reads one call after `<invoke name="`. `word`: the beginning of the tags."""
    parameter, end_parameter = f'<{word}parameter name="', f"</{word}parameter>"
    end_call = f"</{word}invoke>"
    name = yield from reader.name(ATTRIBUTE)
    if not name or not (yield from reader.takes('"')):
        return False
    tag = yield from reader.takes(">", "/>")
    if not tag:
        return False
    writer.call(name)
    tag = "" if tag == "/>" else (yield from reader.takes(parameter, end_call))
    while tag == parameter:
        key, _ = yield from reader.collect('"')
        attributes, _ = yield from reader.collect(">")
        text = yield from reader.value(end_parameter, (parameter, end_call))
        is_json = 'string="false"' in attributes if "string=" in attributes else None
        writer.argument(key, text, is_json=is_json)
        tag = yield from reader.takes(parameter, end_call)
    writer.end_arguments()
    return True


def _format(name: str, word: str, section: str, markers: tuple[str, ...], kind: str) -> ToolFormat:
    """The format whose tags begin with `word`. `section`: the tag around all calls. `kind`: the attribute of
    a parameter that a grammar writes."""
    begin, end = f"<{section}>", f"</{section}>"
    return ToolFormat(
        name=name,
        markers=markers,
        opens=(f'<{word}invoke name="',),
        skips=(begin, end),
        read=partial(_read, word),
        form=CallForm(
            begin=f"{begin}\n",
            head=f'<{word}invoke name="{NAME}">\n',
            tail=f"</{word}invoke>\n",
            end=end,
            argument=(f'<{word}parameter name="{KEY}"{kind}>', f"</{word}parameter>\n"),
        ),
    )


_DSML = "｜DSML｜"  # noqa: RUF001
_KIND = f' string="{KIND}"'
MINIMAX = _format("minimax", "", "minimax:tool_call", ("minimax:tool_call",), "")
DEEPSEEK_V32 = _format("deepseek_v32", _DSML, f"{_DSML}function_calls", (_DSML, "function_calls"), _KIND)
DEEPSEEK_V4 = _format("deepseek_v4", _DSML, f"{_DSML}tool_calls", (_DSML,), _KIND)
DEEPSEEK_V41 = _format("deepseek_v41", f"{_DSML} ", f"{_DSML} calls", (_DSML, " calls>"), _KIND)
