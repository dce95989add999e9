"""What a grammar's process answers: masks, ends, and what the validator says of answers and of calls' arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from coordinator.entrypoints.openai.call_grammar import answer_grammar
from coordinator.entrypoints.openai.formats.table import TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.tools import Function, JsonSchema, ResponseFormat
from splitserve.grammars import child
from splitserve.grammars.child import COMPLETE, FAILED, MASK, GrammarRow, LibraryGrammar
from splitserve.models.hf_tokenizer import HfTokenizer
from splitserve.models.tokenizer_files import TokenizerDefinition
from tests.support.formats.recorded_model import make_recorded_model

EOS = 256
BYTES = [chr(byte) for byte in range(EOS)]
TOKENIZER = child.tokenizer_of({"definition": None, "tokens": [*BYTES, ""], "eos": [EOS]})
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "uniqueItems": True}


def row(kind: str, text: str) -> GrammarRow:
    assert not isinstance(TOKENIZER, str)
    return GrammarRow(LibraryGrammar(kind, text, TOKENIZER))


def of_schema(schema: Any) -> GrammarRow:
    return row("json_schema", json.dumps(schema))


def allowed(answer: bytes) -> set[int]:
    return {token for token in range(257) if answer[token // 8] >> token % 8 & 1}


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_tag_is_one_token_where_the_model_has_one(adds_space: bool, tmp_path: Path) -> None:
    tokenizer = make_recorded_model(tmp_path)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokens = HfTokenizer(TokenizerDefinition(tokenizer, {}, {}))
    size, eos, tag = tokens.vocabulary_size, tokens.encode("<|endoftext|>"), tokens.encode("<tool_call>")[0]
    vocabulary = {
        "definition": tokens.definition(),
        "tokens": [tokens.token_bytes(token).decode("latin-1") for token in range(size)],
        "eos": eos,
    }
    library = child.tokenizer_of(vocabulary)
    assert library is not None
    assert not isinstance(library, str)
    for grammar, first in (('start: "<tool_call>"', {tag}), ('start: /[a-z]/ | "<tool_call>"', None)):
        made = GrammarRow(LibraryGrammar("lark", grammar, library))
        _, mask = made.advance([])
        may_come = {token for token in range(size) if mask[token // 8] >> token % 8 & 1}
        assert tag in may_come
        assert first is None or may_come == first
        assert made.advance([tag])[0] == COMPLETE
    text = '<tool_call>\n{"name": "now"}'
    assert tokens.decode(library.tokenize_str(text), keep_special=True) == text


def said(row: GrammarRow, text: str) -> tuple[int, bytes]:
    return row.advance(list(text.encode()))


def test_the_end_is_allowed_where_the_validator_agrees() -> None:
    status, mask = said(of_schema({"type": "number", "multipleOf": 0.07}), "0.1")
    assert status == MASK
    assert EOS not in allowed(mask)
    assert ord("4") in allowed(mask)
    status, mask = said(of_schema({"type": "number", "multipleOf": 0.07}), "0.14")
    assert EOS in allowed(mask)


def test_an_answer_that_nothing_can_mend_fails_by_name() -> None:
    assert said(of_schema(DIGITS), "[1, 2]")[0] == COMPLETE
    status, why = said(of_schema(DIGITS), "[1, 1]")
    assert (status, b"does not satisfy the schema" in why, b"unique" in why) == (FAILED, True, True)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "maximum": 9007199254740999}, "9007199254740999", "9007199254741000"),
        ({"type": "object", "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1, "a": 2}'),
        ({"type": "string", "pattern": "^(?!no)"}, '"yes"', '"no"'),
        ({"type": "string", "not": {"const": "a"}}, '"b"', '"a"'),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 2}}, "[1, 2]", "[1]"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"a": 1}', '{"ab": 1}'),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "1", "3"),
        ({"oneOf": [{"type": "number"}, {}]}, '"a"', "1e999"),
        ({"type": "number", "not": {"const": 0}}, "1e999", "0.0"),
    ],
)
def test_what_the_grammar_does_not_hold_the_validator_does(schema: Any, right: str, wrong: str) -> None:
    status, mask = said(of_schema(schema), right)
    assert status == COMPLETE or (status == MASK and EOS in allowed(mask))
    status, mask = said(of_schema(schema), wrong)
    assert status == FAILED or EOS not in allowed(mask)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def lark_of(function: Function, **form: Any) -> str:
    grammar = answer_grammar(AnswerFormat(TOOL_FORMATS["hermes"]), [function], **form)
    assert grammar is not None
    return grammar.lark


@pytest.mark.parametrize("form", [{"must_call": True}, {"must_call": False}])
def test_arguments_of_calls_are_checked(form: dict[str, bool]) -> None:
    function = Function(name="f", parameters={"properties": {"a": DIGITS}})
    lark = lark_of(function, **form)
    status, mask = said(row("lark", lark), call('{"a": [1, 2]}'))
    assert (status, EOS in allowed(mask)) == (MASK, True)
    status, why = said(row("lark", lark), call('{"a": [1, 1]}'))
    assert status == FAILED
    assert why.startswith(b"arguments_0: the answer does not satisfy the schema at a: ")
    both = row("lark", lark)
    assert said(both, call('{"a": [1]}'))[0] == MASK
    assert said(both, "\n" + call('{"a": [2, 2]}'))[0] == FAILED


def test_content_beside_tools_is_checked() -> None:
    content = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=DIGITS)).form
    lark = lark_of(Function(name="f"), form=content)
    assert said(row("lark", lark), "[1, 2]")[0] == COMPLETE or EOS in allowed(
        said(row("lark", lark), "[1, 2]")[1]
    )
    status, mask = said(row("lark", lark), "[1, 1]")
    assert status == FAILED or EOS not in allowed(mask)


def test_an_embedded_schema_that_is_not_captured_must_be_exact() -> None:
    with pytest.raises(ValueError, match=r"%json\.uniqueItems: "):
        row("lark", f"start: %json {json.dumps(DIGITS)}")
    assert said(row("lark", 'start: %json {"type": "boolean"}'), "true")[0] == COMPLETE
