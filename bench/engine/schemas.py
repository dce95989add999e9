"""Searches for answers that end with `stop` and break their schema: `python -m bench.engine.schemas --count 1000`.

Schemas are made from seeds, which are put into one another and changed at random. `--suite` takes the seeds from the
JSON Schema test suite: `json/tests/draft2020-12` in the source package of `jsonschema`, or `tests/data`. Answers are
random walks within the masks. `jsonschema`, which is another validator than that of the product, judges them. Prints
what broke, and how many were answered or refused.

The code that grammars' processes run does the work, many schemas in one process. One that ends its process costs that
process alone, as in the product.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, validators  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable

from engine.runner.simulated_runner import EOS_TOKEN_ID, VOCABULARY_SIZE
from splitserve.errors import InvalidArgumentError
from splitserve.grammars.child import (
    COMPLETE,
    FAILED,
    MEMORY_BYTES,
    STEP_CPU_S,
    GrammarRefusedError,
    GrammarRow,
    LibraryGrammar,
    allow,
    bound_memory,
    tokenizer_of,
)
from splitserve.grammars.forms import check_grammar
from splitserve.grammars.processes import SLOW_CPU_S
from splitserve.grammars.schemas import SchemaError
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.v1.generation_pb2 import Grammar

BATCH = 500
"""Schemas of one process."""
VOCABULARY = {
    "definition": None,
    "tokens": [ByteTokenizer().token_bytes(token).decode("latin-1") for token in range(VOCABULARY_SIZE)],
    "eos": [EOS_TOKEN_ID],
}
STOP, LENGTH, REFUSED, ENDED = "stop", "length", "refused", "ended its process"
UNJUDGED = "stop, not judged"
"""The judge cannot read a pattern, a number has too many digits for it, or parts share one `$id`."""

SEEDS: list[Any] = [
    {"const": 9007199254740993},
    {"enum": [1, 1.0, "1", [1], {"a": 1}, None, True]},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"maximum": 9007199254740999, "type": "integer"},
    {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0},
    {"type": "integer", "multipleOf": 3, "minimum": 2},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "password"},
    {"type": "string", "pattern": "^(?!a)[a-c]{1,3}$"},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 3},
    {"type": "array", "contains": {"const": 1}, "minContains": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 2},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]},
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"if": {"type": "integer"}, "then": {"minimum": 0}, "else": {"type": "string"}},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}], "not": {"const": True}},
    {"allOf": [{"type": "string"}, {"maxLength": 3}, {"pattern": "^b*$"}]},
    {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    True,
]
CLOSING = frozenset(b'"]},0123456789')
NUMBERS = [0, 1, -1, 2, 0.5, 0.1, 1e-3, 2**31, 2**53, 2**53 + 1, -(2**63), 2**63 - 1, 10**25, 1e300]


def seeds_of(suite: Path) -> list[Any]:
    """The schemas of a copy of the test suite, or of a file of schemas; without those that refer to others."""
    if suite.is_file():
        schemas: list[Any] = json.loads(suite.read_text())["schemas"]
        return schemas
    groups = (json.loads(file.read_text()) for file in sorted(suite.rglob("*.json")))
    return [
        group["schema"] for each in groups for group in each if "http://localhost" not in json.dumps(group)
    ]


def made(pick: random.Random, seeds: list[Any], depth: int = 2) -> Any:
    """A schema from a few seeds, some of them changed."""
    schema = json.loads(json.dumps(pick.choice(seeds)))
    if pick.random() < 0.5:
        schema = changed(pick, schema)
    if depth and pick.random() < 0.6:
        inner = [made(pick, seeds, depth - 1) for _ in range(pick.randint(1, 3))]
        names = [f"k{number}" for number in range(len(inner))]
        shapes: list[Any] = [
            {"allOf": [schema, *inner]},
            {"anyOf": [schema, *inner]},
            {"type": "array", "items": inner[0], "minItems": pick.randint(0, 2), "maxItems": 3},
            {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)},
            {"type": "object", "properties": dict(zip(names, inner, strict=True)), "required": names[:1]},
            {
                "type": "object",
                "properties": dict(zip(names, inner, strict=True)),
                "required": names,
                "additionalProperties": False,
            },
        ]
        schema = pick.choice(shapes)
    return schema


def changed(pick: random.Random, value: Any) -> Any:
    """A copy of a schema with a number, or a keyword, that differs."""
    if isinstance(value, dict) and value:
        key = pick.choice(list(value))
        if pick.random() < 0.2:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: changed(pick, value[key])}
    if isinstance(value, list) and value:
        place = pick.randrange(len(value))
        return [*value[:place], changed(pick, value[place]), *value[place + 1 :]]
    return pick.choice(NUMBERS) if isinstance(value, int | float) and not isinstance(value, bool) else value


def walk(row: GrammarRow, pick: random.Random, tokens: int) -> tuple[str, str]:
    """A random answer, and how it ended: STOP, LENGTH or why it failed. Takes `tokens` at most."""
    answer = bytearray()
    last: list[int] = []
    while len(answer) < tokens:
        status, mask = row.advance(last)
        if status == FAILED:
            return answer.decode(errors="replace"), mask.decode()
        allowed = [token for token in range(VOCABULARY_SIZE) if mask[token // 8] >> token % 8 & 1]
        end = EOS_TOKEN_ID in allowed
        if status == COMPLETE or (end and (len(allowed) == 1 or pick.random() < 0.5)):
            return answer.decode(errors="replace"), STOP
        # Letters seldom: an unbounded string would never end.
        closing = [token for token in allowed if token in CLOSING]
        letters = [token for token in allowed if token != EOS_TOKEN_ID]
        last = [pick.choice(closing if closing and pick.random() < 0.7 else letters)]
        answer += bytes(last)
    return answer.decode(errors="replace"), LENGTH


def tried(schema: Any, tokenizer: Any, pick: random.Random, tokens: int = 300) -> tuple[str, str]:
    """How the answer to a schema ended, and what broke; empty if nothing did."""
    text = json.dumps(schema)
    allow(SLOW_CPU_S)
    try:
        check_grammar(Grammar(json_schema=text))
        grammar = LibraryGrammar("json_schema", text, tokenizer)
    except (InvalidArgumentError, GrammarRefusedError, SchemaError):
        return REFUSED, ""
    allow(STEP_CPU_S * 20)
    answer, end = walk(GrammarRow(grammar), pick, tokens)
    allow(0)
    if end != STOP:
        return end if end == LENGTH else "failed", ""
    end, wrong = judged(schema, answer)
    return end, wrong and f"{text} answered {answer}: {wrong}"


def search(seeds: list[Any], count: int, seed: int, jobs: int = 1) -> tuple[Counter[str], list[str]]:
    """How so many schemas ended, and what broke. Schema number n is the same in every search with its seed."""
    tokenizer = tokenizer_of(VOCABULARY)
    batches = [range(start, min(start + BATCH, count)) for start in range(0, count, BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(chain.from_iterable(pool.map(partial(_batch, seeds, seed, tokenizer), batches)))
    return Counter(end for end, _ in found), [broken for _, broken in found if broken]


def _batch(seeds: list[Any], seed: int, tokenizer: Any, numbers: range) -> list[tuple[str, str]]:
    """What was found of so many schemas, by processes of which each begins where the last one ended."""
    found: list[tuple[str, str]] = []
    while len(found) < len(numbers):
        found += _forked(seeds, seed, tokenizer, numbers[len(found) :])
        if len(found) < len(numbers):
            found.append((ENDED, ""))
    return found


def _forked(seeds: list[Any], seed: int, tokenizer: Any, numbers: range) -> list[tuple[str, str]]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 1
        try:
            bound_memory(4 * MEMORY_BYTES)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes there before it aborts
            with os.fdopen(writing, "w", buffering=1) as results:
                for number in numbers:
                    pick = random.Random(f"{seed}.{number}")
                    schema = made(pick, seeds)
                    schema = schema if isinstance(schema, dict | bool) else True
                    results.write(json.dumps(tried(schema, tokenizer, pick)) + "\n")
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as results:
        found = [(end, broken) for end, broken in map(json.loads, results)]
    os.waitpid(child, 0)
    return found


def judged(schema: Any, answer: str) -> tuple[str, str]:
    """STOP, and why an answer breaks its schema, empty if it does not; or UNJUDGED."""
    try:
        exact = json.loads(json.dumps(_as_python(schema)), parse_float=Decimal)
        value = json.loads(answer, parse_float=Decimal)
        error = next(EXACT(exact).iter_errors(value), None)
    except (re.error, ArithmeticError, Unresolvable):
        return UNJUDGED, ""
    except Exception as error:
        return STOP, f"{type(error).__name__}: {error}"
    return STOP, error.message if error is not None else ""


def _is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, Decimal) and value == value.to_integral_value())


EXACT = validators.extend(
    Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)
"""Takes fractions as Decimal: exact, and without a largest one."""
_ESCAPES = {"\\d": "[0-9]", "\\D": "[^0-9]", "\\w": "[A-Za-z0-9_]", "\\W": "[^A-Za-z0-9_]", "$": r"\Z"}


def _as_python(schema: Any) -> Any:
    """A schema for the judge: with its patterns, which are JavaScript's, as Python reads them."""
    if isinstance(schema, list):
        return [_as_python(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$schema":  # a part that has one would be judged by the standard's own validator
            continue
        if key == "pattern" and isinstance(value, str):
            made[key] = _pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            made[key] = {_pattern(pattern): _as_python(inner) for pattern, inner in value.items()}
        else:
            made[key] = value if key in ("const", "enum") else _as_python(value)
    return made


def _pattern(given: str) -> str:
    return re.sub(r"\\.|\$", lambda found: _ESCAPES.get(found[0], found[0]), given, flags=re.DOTALL)


def main() -> None:
    """Searches and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    seeds = seeds_of(options.suite) if options.suite else SEEDS
    ends, broken = search(seeds, options.count, options.seed, options.jobs)
    for line in broken:
        print(line)
    print(json.dumps({"broken": len(broken), **ends}))


if __name__ == "__main__":
    main()
