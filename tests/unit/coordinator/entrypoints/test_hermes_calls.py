"""Calls in the format of Hermes: what is one, and what comes of a text that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.entrypoints.openai.formats.table import TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart
from tests.support.formats.samples import read

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


HERMES = AnswerFormat(TOOL_FORMATS["hermes"])


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text outside of calls, and (name, arguments) of each."""
    found = read(HERMES, pieces)
    return found.text, found.calls


CASES = [
    ("Hello there", ("Hello there", [])),
    ("  spaces stay  ", ("  spaces stay  ", [])),
    ("a < b <tool_cal and <tool_calls>", ("a < b <tool_cal and <tool_calls>", [])),
    (WEATHER, ("", [("get_weather", '{"city": "Paris"}')])),
    (f"Let me see.\n\n{WEATHER}", ("Let me see.", [("get_weather", '{"city": "Paris"}')])),
    (f"{WEATHER}\n{NOW}\n", ("", [("get_weather", '{"city": "Paris"}'), ("now", "{}")])),
    (
        '<tool_call>{"name":"f","arguments":{"s":"} </tool_call> \\" {","l":[{}]}}</tool_call>',
        ("", [("f", '{"s":"} </tool_call> \\" {","l":[{}]}')]),
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("<tool_call>no JSON</tool_call> x", ("<tool_call>no JSON</tool_call> x", [])),
    ('<tool_call>{"name": 7}</tool_call>', ('<tool_call>{"name": 7}</tool_call>', [])),
    ('<tool_call>{"name": "f", "argu', ("", [])),
    ("Hello <tool_", ("Hello", [])),
    ("so that a <", ("so that a <", [])),
    ('<tool_call>{"name": "f", "arguments": {"a": "cut o', ("", [("f", '{"a": "cut o')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (
        '<tool_call>{"name": "größe", "arguments": {"ü": "世界"}}</tool_call>',
        ("", [("größe", '{"ü": "世界"}')]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_parsing_is_the_same_however_the_text_is_cut(text: str, expected: Any) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for size in (2, 3, 7):
        assert parse([text[start : start + size] for start in range(0, len(text), size)]) == expected


@given(
    st.lists(
        st.sampled_from([*'<tol_ca/>{}"\\ ', "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {']),
        max_size=30,
    )
)
def test_anything_may_be_cut_anywhere(pieces: list[str]) -> None:
    assert parse(pieces) == parse(["".join(pieces)]) == parse(list("".join(pieces)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.data(),
)
def test_arguments_come_out_as_they_are(value: Any, data: st.DataObject) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=data.draw(st.booleans()))
    text = f'Hm. <tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    cut = data.draw(st.integers(0, len(text)))
    assert parse([text[:cut], text[cut:]]) == ("Hm.", [("f", arguments)])


def test_arguments_leave_as_they_come() -> None:
    parser = HERMES.parser({}, must_call=False)
    assert parser is not None
    (begun,) = parser.feed('<tool_call>{"name": "f", "arguments": ')[:1] or parser.feed("{")[:1]
    assert isinstance(begun, CallPart)
    assert parser.feed('"a"') == [ArgumentsPart(0, '"a"')]
    assert parser.feed(": [1") == [ArgumentsPart(0, ": [1")]
    assert parser.feed("]}}") == [ArgumentsPart(0, "]}")]
    assert parser.feed("\n</tool_call>\n\n") == []
    assert parser.close() == []
