"""Bounds of grammars: errors before compilation, and errors of the compiler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator import input_processor
from coordinator.input_processor import GrammarCheck, check_compiles
from splitserve.errors import InvalidArgumentError
from splitserve.generation.grammar import MAX_GRAMMAR_BYTES, GrammarThread, check_grammar
from splitserve.v1.generation_pb2 import Grammar, SamplingParams

CHAIN = 200


def schema(value: Any) -> Grammar:
    return Grammar(json_schema=json.dumps(value))


def chain(count: int, last: str = '{"type":"null"}') -> Grammar:
    """A schema with a chain of definitions, each referring to the next."""
    links = ",".join(f'"a{n}":{{"anyOf":[{{"$ref":"#/$defs/a{n + 1}"}},false]}}' for n in range(count))
    return Grammar(json_schema=f'{{"$ref":"#/$defs/a0","$defs":{{{links},"a{count}":{last}}}}}')


def rules(count: int) -> Grammar:
    return Grammar(
        lark="start: r0\n" + "\n".join(f"r{n}:r{n + 1}" for n in range(count)) + f'\nr{count}: "a"'
    )


FINE = [
    schema({"type": "object", "properties": {"a": {"type": "string"}}}),
    schema(True),
    Grammar(json_object=True),
    Grammar(regex=r"[a-z]{3}"),
    Grammar(lark='start: "yes" | "no"'),
    chain(CHAIN),
    rules(CHAIN),
]


@pytest.mark.parametrize("grammar", FINE)
async def test_what_is_fine(grammar: Grammar) -> None:
    check_grammar(grammar)
    check, sampling = GrammarCheck(), SamplingParams(grammar=grammar)
    await check.check(sampling)
    await check.check(sampling)


async def test_a_grammar_of_many_answers_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    monkeypatch.setattr(input_processor, "check_compiles", compiled.append)
    check, sampling = GrammarCheck(), SamplingParams(grammar=FINE[0])
    await asyncio.gather(*(check.check(sampling) for _ in range(20)))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("grammar", "field", "words"),
    [
        (Grammar(), "", "one of json_schema, json_object, regex, lark"),
        (Grammar(json_object=False), ".json_object", "true"),
        (Grammar(regex=""), ".regex", "bytes"),
        (Grammar(lark=""), ".lark", "bytes"),
        (Grammar(json_schema=""), ".json_schema", "bytes"),
        (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), ".regex", "bytes"),
        (Grammar(lark="é" * (MAX_GRAMMAR_BYTES // 2 + 1)), ".lark", "bytes"),
        (Grammar(json_schema="{"), ".json_schema", "JSON"),
        (Grammar(json_schema="[" * 100_000), ".json_schema", "nests too deeply"),
        (Grammar(json_schema="3"), ".json_schema", "object or a boolean"),
        (Grammar(json_schema="[]"), ".json_schema", "object or a boolean"),
        (chain(5_000), ".json_schema", "nest in one another"),
        (rules(16_500), ".lark", "nest in one another"),
        (Grammar(lark=f"start: %json {chain(5_000).json_schema}"), ".lark", "nest in one another"),
    ],
)
def test_bounds(grammar: Grammar, field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        check_grammar(grammar)
    assert caught.value.field == f"sampling.grammar{field}"


@pytest.mark.parametrize(
    ("grammar", "field", "words"),
    [
        (schema({"not": {"type": "string"}}), "json_schema", "not"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "json_schema", "minimum"),
        (schema({"$ref": "http://example.com/other.json"}), "json_schema", "example.com"),
        (schema(False), "json_schema", "Unsatisfiable"),
        (Grammar(json_schema='{"enum": ["\\ud800"]}'), "json_schema", "hex escape"),
        (Grammar(json_schema='{"a":' * 500 + "1" + "}" * 500), "json_schema", "recursion limit"),
        (Grammar(regex="((("), "regex", "unclosed group"),
        (Grammar(regex="(?=a)b"), "regex", "look-around"),
        (Grammar(regex="(" * 5_000 + ")" * 5_000), "regex", "invalid regex"),
        (Grammar(lark="start: ]["), "lark", "expecting"),
        (Grammar(lark="start: A\nA: B\nB: A"), "lark", "circular"),
        (Grammar(lark="start: " + "(" * 500 + '"a"' + ")" * 500), "lark", "nested"),
    ],
)
async def test_what_does_not_compile(grammar: Grammar, field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        await GrammarCheck().check(SamplingParams(grammar=grammar))
    assert caught.value.field == f"sampling.grammar.{field}"
    assert caught.value.reason == "GRAMMAR_REFUSED"
    assert "\n" not in caught.value.message


async def test_what_is_just_within_the_bounds_does_not_overflow_the_stack() -> None:
    thread = GrammarThread()
    for grammar in (rules(8_000), chain(2_700), chain(2_700, '{"items":{"items":{}}}')):
        await thread.run(lambda grammar=grammar: check_compiles(grammar))  # type: ignore[misc]


async def test_no_grammar_costs_nothing() -> None:
    await GrammarCheck().check(SamplingParams())
