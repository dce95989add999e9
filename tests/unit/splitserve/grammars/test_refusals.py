"""Refused schemas name the path and the keywords in the words of JSON Schema, not of the library."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from splitserve.grammars.child import GrammarRefusedError, LibraryGrammar
from splitserve.grammars.schemas import STRICT, SchemaError

LIBRARY = re.compile(
    r"Unsatisfiable|at \d+\(\d+\)|capture|coerce|NoExtension|lexer|lookaround|registry|anyOf' keyword"
)
RULES = 'start: first second\nfirst[capture]: %json {"type": "object"}\nsecond[capture]: %json '


def inside(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"b": {}, "a": keywords}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            inside(type="integer", minimum=5, maximum=1),
            "properties.a: no value satisfies minimum and maximum",
        ),
        (
            inside(type="string", minLength=5, maxLength=1),
            "properties.a: no value satisfies minLength and maxLength",
        ),
        (
            inside(type="array", minItems=2, maxItems=1),
            "properties.a: no value satisfies minItems and maxItems",
        ),
        (inside(type="integer", enum=["x"]), "properties.a: no value satisfies type and enum"),
        (inside(allOf=[{"type": "string"}, {"type": "null"}]), "properties.a: no value satisfies allOf"),
        (
            inside(type="string", pattern="^abc$", maxLength=2),
            "properties.a: no value satisfies pattern and maxLength",
        ),
        (
            inside(type="object", properties={"c": {"enum": []}}, required=["c"]),
            "properties.a.properties.c: no value satisfies enum",
        ),
        (inside(type="string", pattern=r"\bx"), r'properties.a.pattern: "\\bx" cannot be held by a grammar'),
        (inside(oneOf=[{"type": "string"}, {"minLength": 3}]), "properties.a.oneOf: [{"),
        (inside(items={"pattern": "a^b"}), 'properties.a.items.pattern: "a^b" cannot'),
        (
            {"$defs": {"x": {"enum": []}}, **inside(**{"$ref": "#/$defs/x"})},
            "properties.a: no value satisfies $ref",
        ),
        ({"type": "object", "maxProperties": 1, "required": ["a", "b"]}, "no value satisfies"),
        (inside(type="text"), "properties.a.type: must be one of array, boolean"),
        (inside(**{"$ref": "#/$defs/no"}), "$ref: '/$defs/no' is not in the schema"),
        (inside(**{"$ref": "https://x.example/a"}), "$ref: 'https://x.example/a' is not in the schema"),
        ({"$schema": "none"}, "$schema: 'none' is no version of JSON Schema"),
        (inside(**{"not": {}}), "properties.a.not: {} cannot be held exactly"),
        ({"x-guidance": {"whitespace_pattern": "("}}, "x-guidance: "),
    ],
)
def test_the_path_and_the_keywords_are_named(schema: dict[str, Any], expected: str) -> None:
    for kind, prefix in (("json_schema", ""), ("lark", "second.")):
        text = json.dumps({"x-guidance": STRICT, **schema})
        with pytest.raises((GrammarRefusedError, SchemaError)) as caught:
            LibraryGrammar(kind, RULES + text if kind == "lark" else text, None)
        message = str(caught.value)
        assert expected in message
        assert message.startswith(prefix.rstrip("."))
        assert not LIBRARY.search(message), message


def test_a_lark_grammar_of_the_client_keeps_the_words_of_the_library() -> None:
    with pytest.raises(GrammarRefusedError, match="nothing"):
        LibraryGrammar("lark", "start: nothing", None)
