"""Tool calls: the grammar that holds a model to them, and the parser that finds them in growing text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from coordinator.entrypoints.openai.tool_parser import ArgumentsPart, CallPart, TextPart, ToolCallParser
from coordinator.entrypoints.openai.tools import Function, tools_grammar

FUNCTIONS = [
    Function(
        name="get_weather",
        parameters={
            "$defs": {"City": {"type": "string"}},
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    ),
    Function(name="now", parameters={"properties": {"a": {"type": "integer"}}}, strict=False),
]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Bytes:
    """A vocabulary of bytes for llguidance."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(text: str, **form: Any) -> bool:
    """Whether the grammar accepts exactly this text."""
    grammar = tools_grammar(
        FUNCTIONS, **({"must_call": False, "parallel": True, "content_schema": None} | form)
    )
    matcher = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(grammar.lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def test_a_call_that_must_be() -> None:
    for text in (WEATHER, NOW, f"{WEATHER}\n{NOW}"):
        assert accepts(text, must_call=True)
    for text in ("", "Hello", f"Hello {NOW}", f"{NOW} Hello", WEATHER.replace('"Paris"', "7"), WEATHER[:-3]):
        assert not accepts(text, must_call=True)
    assert not accepts(f"{WEATHER}\n{NOW}", must_call=True, parallel=False)


def test_a_call_that_may_be() -> None:
    for text in ("", "Hello <tool", f"Hello {WEATHER}", f"a\nb {WEATHER}\n{NOW}", '{"a": 1}'):
        assert accepts(text)
    for text in (
        '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>',
        f"{NOW} and",
        "x <tool_call>",
    ):
        assert not accepts(text)


def test_a_call_or_json() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts('{"a": 1}', content_schema=schema)
    assert accepts(NOW, content_schema=schema)
    assert not accepts("Hello", content_schema=schema)


def test_arguments_that_are_not_strict() -> None:
    assert accepts('<tool_call>\n{"name": "now", "arguments": {"a": "text"}}\n</tool_call>', must_call=True)
    assert not accepts('<tool_call>\n{"name": "now", "arguments": 7}\n</tool_call>', must_call=True)


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text outside of calls, and (name, arguments) of each; ids and indices are checked."""
    parser = ToolCallParser()
    text, calls, ids = "", [], set()
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.close()]:
        match part:
            case TextPart(more):
                assert more
                text += more
            case CallPart(index, call_id, name):
                assert index == len(calls)
                ids.add(call_id)
                calls.append((name, ""))
            case ArgumentsPart(index, more):
                assert index == len(calls) - 1
                calls[index] = calls[index][0], calls[index][1] + more
    assert len(ids) == len(calls) == parser.calls
    return text, calls


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


@pytest.mark.parametrize("length", range(1, len(WEATHER)))
def test_a_call_that_is_cut_anywhere_leaves_no_text(length: int) -> None:
    for text, shown in ((WEATHER[:length], ""), (f"Hm.\n{WEATHER[:length]}", "Hm.")):
        parser = ToolCallParser()
        parts = [*parser.feed(text), *parser.close(is_cut=True)]
        assert "".join(part.text for part in parts if isinstance(part, TextPart)) == shown


def test_an_answer_of_calls_alone_has_no_text() -> None:
    for text in ("<", "<tool", f"{NOW}\n<", WEATHER[:20], "<tool_call>no JSON</tool_call>"):
        parser = ToolCallParser(must_call=True)
        parts = [*parser.feed(text), *parser.close()]
        assert not any(isinstance(part, TextPart) for part in parts)


def test_arguments_leave_as_they_come() -> None:
    parser = ToolCallParser()
    (begun,) = parser.feed('<tool_call>{"name": "f", "arguments": ')[:1] or parser.feed("{")[:1]
    assert isinstance(begun, CallPart)
    assert parser.feed('"a"') == [ArgumentsPart(0, '"a"')]
    assert parser.feed(": [1") == [ArgumentsPart(0, ": [1")]
    assert parser.feed("]}}") == [ArgumentsPart(0, "]}")]
    assert parser.feed("\n</tool_call>\n\n") == []
    assert parser.close() == []
