"""The grammars that hold answers to their tools, in the format of each family, beginning after the reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from coordinator.entrypoints.openai.call_grammar import answer_grammar
from coordinator.entrypoints.openai.chat import ChatRequest
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.tools import Function, JsonSchema, ResponseFormat, choice_grammar
from splitserve.v1.generation_pb2 import Grammar
from tests.support.formats.samples import CALLS, SAMPLES, read

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
HERMES = AnswerFormat(TOOL_FORMATS["hermes"])
SPELLED = sorted(name for name in SAMPLES if TOOL_FORMATS[name].form is not None)


class Bytes:
    """A vocabulary of bytes for llguidance."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))


def matcher(grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None
    made = LLMatcher(VOCABULARY, LLMatcher.grammar_from_lark(grammar.lark), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(text: str, answer: AnswerFormat = HERMES, functions: Any = FUNCTIONS, **form: Any) -> bool:
    """Whether the grammar accepts exactly this text."""
    made = matcher(answer_grammar(answer, functions, **form))
    return all(made.consume_token(byte) for byte in text.encode()) and made.is_accepting()


def schema_format(schema: dict[str, Any]) -> Grammar | None:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)).form


def test_a_call_that_must_be() -> None:
    for text in (WEATHER, NOW, f"{WEATHER}\n{NOW}"):
        assert accepts(text, must_call=True)
    for text in ("", "Hello", f"Hello {NOW}", f"{NOW} Hello", WEATHER.replace('"Paris"', "7"), WEATHER[:-3]):
        assert not accepts(text, must_call=True)
    assert not accepts(f"{WEATHER}\n{NOW}", must_call=True, parallel=False)


def test_a_call_that_may_be() -> None:
    for text in ("", "Hello <tool", f"Hello {WEATHER}", f"a\nb {WEATHER}\n{NOW}", '{"a": 1}'):
        assert accepts(text)
    unknown = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
    for text in (unknown, f"{NOW} and", "x <tool_call>"):
        assert not accepts(text)


def test_a_call_or_json() -> None:
    asked = schema_format({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts('{"a": 1}', form=asked)
    assert accepts(NOW, form=asked)
    assert not accepts("Hello", form=asked)


def test_arguments_that_are_not_strict() -> None:
    assert accepts('<tool_call>\n{"name": "now", "arguments": {"a": "text"}}\n</tool_call>', must_call=True)
    assert not accepts('<tool_call>\n{"name": "now", "arguments": 7}\n</tool_call>', must_call=True)


@pytest.mark.parametrize("name", SPELLED)
def test_what_a_grammar_makes_is_read_as_calls(name: str) -> None:
    """An answer is drawn from the grammar, byte by byte, and read by the family's reader."""
    answer = AnswerFormat(TOOL_FORMATS[name])
    functions = [
        Function(
            name="get_weather",
            parameters={
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        )
    ]
    made = matcher(answer_grammar(answer, functions, must_call=True, parallel=False))
    text = bytearray()
    while not made.is_accepting() and len(text) < 1000:
        allowed = made.compute_logit_bias()
        byte = next(byte for byte in (*b'"{}[]<>|', *range(33, 256), 32, 10) if allowed[byte])
        text.append(byte)
        assert made.consume_token(byte)
    found = read(answer, [text.decode()], tools={one.name: one.parameters for one in functions})
    assert found.text == ""
    ((called, arguments),) = found.calls
    assert called == "get_weather"
    values = json.loads(arguments)
    assert values["city"] in ("Paris", "Rome")
    assert 1 <= values["days"] <= 9


@pytest.mark.parametrize("name", SPELLED)
def test_the_familys_own_calls_are_spelled(name: str) -> None:
    """What the family's models write is what the grammar allows, for the samples that have the usual line ends."""
    sample = SAMPLES[name]
    functions = [
        Function(name=called, parameters={"type": "object", "properties": {}}) for called, _ in CALLS
    ]
    functions[0] = functions[0].model_copy(
        update={"parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
    )
    answer = AnswerFormat(TOOL_FORMATS[name])
    if sample.is_spelled:
        assert accepts(sample.calls, answer, functions, must_call=True)
        if not TOOL_FORMATS[name].is_bare:
            assert accepts(f"Hm. {sample.calls}", answer, functions)
            opening = sample.calls[: next(n for n, c in enumerate(sample.calls) if c.isalnum() and n > 30)]
            assert not accepts(f"{opening}\x07", answer, functions)


@pytest.mark.parametrize("is_reasoning", [True, False])
def test_a_grammar_begins_after_the_reasoning(is_reasoning: bool) -> None:
    answer = replace(HERMES, reasoning=REASONING_FORMATS["think"], is_reasoning=is_reasoning)
    thought = f"{'' if is_reasoning else '<think>'}Or <tool_call>?\nNo: {{}}</think>\n\n"
    assert accepts(thought + WEATHER, answer, must_call=True)
    assert not accepts(f"{thought}Hello", answer, must_call=True)
    assert accepts(f"{thought}Hello", answer)
    assert accepts(f"{thought}Hello {WEATHER}\n{NOW}", answer)
    assert not accepts(f"{thought}Hello <tool_call>no", answer)
    asked = schema_format({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(thought + '{"a": 1}', answer, form=asked)
    assert accepts(thought + '{"a": 1}', answer, [], form=asked)
    assert not accepts(f"{thought}Hello", answer, [], form=asked)
    if not is_reasoning:
        assert accepts(WEATHER, answer, must_call=True)
        assert accepts('{"a": 1}', answer, [], form=asked)


@pytest.mark.parametrize(
    ("form", "text", "other"),
    [
        (choice_grammar(["a", "ab", 'é😀"\n']), 'é😀"\n', "abc"),
        (Grammar(regex=r"a/b|\/[/]\\"), "//\\", "a"),
        (Grammar(regex="a\nb"), "a\nb", "anb"),
        (Grammar(lark='start: sum\nsum: N ("}" N)*\nN: /[0-9]/'), "1}2", "1}"),
    ],
)
def test_forms_beside_tools_and_reasoning(form: Grammar, text: str, other: str) -> None:
    thinking = replace(HERMES, reasoning=REASONING_FORMATS["think"], is_reasoning=True)
    for answer, functions, thought in (
        (HERMES, FUNCTIONS, ""),
        (thinking, [], "Hm.</think>\n"),
        (thinking, FUNCTIONS, "Hm.</think>"),
    ):
        assert accepts(thought + text, answer, functions, form=form)
        assert not accepts(thought + other, answer, functions, form=form)
        assert accepts(thought + NOW, answer, functions, form=form) == bool(functions)


def test_text_with_structures_in_it() -> None:
    structures = [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": ""},
        {"begin": "[", "schema": {"type": "boolean"}, "end": "]"},
    ]
    tag = {"structures": structures, "triggers": ["<f", "["]}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for asked in (
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"response_format": tag | {"type": "structural_tag"}},
    ):
        (form,) = ChatRequest.model_validate(body | asked).forms.values()
        for text in ("", "Hi <b>.", "<f=a>7</f>", 'See <f=a>7</f>, <f=b>"x" and [true]\n.'):
            made = matcher(form)
            assert all(made.consume_token(byte) for byte in text.encode()), text
            assert made.is_accepting()
        for text in ("<f", "<f=c>", "Hi <f=a>x", "a [1]", '<f=b>"y"'):
            made = matcher(form)
            assert not (all(made.consume_token(byte) for byte in text.encode()) and made.is_accepting()), text


def test_plain_answers_have_no_grammar() -> None:
    assert answer_grammar(AnswerFormat()) is None
    assert answer_grammar(AnswerFormat(TOOL_FORMATS["gemma"]), FUNCTIONS) is None
    assert answer_grammar(AnswerFormat(TOOL_FORMATS["llama"]), FUNCTIONS) is None
    whole = answer_grammar(AnswerFormat(), form=ResponseFormat(type="json_object").form)
    assert whole == Grammar(json_object=True)
