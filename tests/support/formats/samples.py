# ruff: noqa: RUF001
"""What models of each family write to call two functions, and the reading of an answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.entrypoints.openai.formats.table import AnswerFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart, ReasoningPart, TextPart

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Mapping[str, Any] = {"get_weather": CITY, "now": {"type": "object", "properties": {}}}
CALLS = [("get_weather", {"city": "Zürich ☔ <b>", "days": 3}), ("now", {})]
"""What each sample says."""


@dataclass
class Found:
    """An answer as it was read."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    ids: list[str] = field(default_factory=list, compare=False)


def cut_by_chance(text: str, seed: int, most: int) -> list[str]:
    """The text in pieces of 1 to `most` characters."""
    drawn, pieces = random.Random(seed), []
    while text:
        length = drawn.randint(1, most)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def read(
    answer: AnswerFormat,
    pieces: Iterable[str],
    *,
    is_cut: bool = False,
    must_call: bool = False,
    tools: Mapping[str, Any] = TOOLS,
) -> Found:
    """Feeds the pieces; indices and the order of parts are checked."""
    parser, found = answer.parser(tools, must_call=must_call), Found()
    assert parser is not None
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.close(is_cut=is_cut)]:
        match part:
            case TextPart(more):
                assert more
                found.text += more
            case ReasoningPart(more):
                assert more
                assert not found.text
                found.reasoning += more
            case CallPart(index, call_id, name):
                assert index == len(found.calls)
                found.ids.append(call_id)
                found.calls.append((name, ""))
            case ArgumentsPart(index, more):
                assert index == len(found.calls) - 1
                found.calls[index] = found.calls[index][0], found.calls[index][1] + more
    assert len(set(found.ids)) == len(found.calls) == parser.calls
    return found


@dataclass(frozen=True)
class Sample:
    """The calls of `CALLS`, as a family writes them."""

    calls: str
    is_spelled: bool = True
    """Whether the grammar's form is this very one."""


_CITY = '{"city": "Zürich ☔ <b>", "days": 3}'
_DSML = "｜DSML｜"


def _invoked(word: str, section: str, text: str = "", number: str = "") -> str:
    return (
        f'<{section}>\n<{word}invoke name="get_weather">\n'
        f'<{word}parameter name="city"{text}>Zürich ☔ <b></{word}parameter>\n'
        f'<{word}parameter name="days"{number}>3</{word}parameter>\n</{word}invoke>\n'
        f'<{word}invoke name="now">\n</{word}invoke>\n</{section}>'
    )


_STRING, _JSON = ' string="true"', ' string="false"'
SAMPLES = {
    "hermes": Sample(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_CITY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "minimax_m1": Sample(
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {_CITY}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_calls>"
    ),
    "granite": Sample(
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_CITY}}}, {{"name": "now", "arguments": {{}}}}]'
    ),
    "phi4": Sample(
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_CITY}}}, {{"name": "now", "arguments": {{}}}}]'
        "<|/tool_call|>"
    ),
    "llama": Sample(
        f'{{"name": "get_weather", "parameters": {_CITY}}}; {{"name": "now", "parameters": {{}}}}'
    ),
    "llama_pythonic": Sample('[get_weather(city="Zürich ☔ <b>", days=3), now()]', is_spelled=False),
    "mistral": Sample(f"[TOOL_CALLS]get_weather[ARGS]{_CITY}[TOOL_CALLS]now[ARGS]{{}}"),
    "mistral_v3": Sample(
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_CITY}}}, {{"name": "now", "arguments": {{}}}}]'
    ),
    "qwen_xml": Sample(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich ☔ <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": Sample(
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich ☔ <b></arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
    ),
    "minimax": Sample(_invoked("", "minimax:tool_call")),
    "deepseek_v32": Sample(_invoked(_DSML, f"{_DSML}function_calls", _STRING, _JSON)),
    "deepseek_v4": Sample(_invoked(_DSML, f"{_DSML}tool_calls", _STRING, _JSON)),
    "deepseek_v41": Sample(_invoked(f"{_DSML} ", f"{_DSML} calls", _STRING, _JSON)),
    "deepseek_v3": Sample(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_CITY}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": Sample(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_CITY}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": Sample(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_CITY}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": Sample(
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich ☔ <b><|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    ),
    "gemma": Sample(
        '<|tool_call>call:get_weather{city:<|"|>Zürich ☔ <b><|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>"
    ),
}
