"""What an answer can be held to: bounds of a grammar, and its form for llguidance. Pure.

A grammar comes from a client and is compiled by native code that recurses along nested definitions. So bounds that
the library has not are checked here before it sees the text: how many bytes, and how deep definitions can nest.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

FIELD = "sampling.grammar"
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_LEVELS = 16_384
"""How many definitions may nest in one another, at worst. Compiling takes up to 4 KiB of stack for each."""

STACK_BYTES = 128 * 2**20
"""Stack of a thread that compiles grammars of at most MAX_LEVELS; only what is used becomes memory."""

MAX_WORDS = 400
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t]{1,32}|\r?\n[ \t]{0,32}"}
"""Between two JSON tokens at most one line break and 32 blanks: a model that likes blanks would fill its budget."""

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_AS_OBJECTS = {"true": "{}", "false": '{"enum": []}'}
"""Boolean schemas, to which llguidance's options cannot be applied."""
_LEVEL_MARKS = re.compile(r"[:(\[{~]")
_EMBEDDED_SCHEMA = re.compile(r"%json\s*")


def check_grammar(grammar: generation_pb2.Grammar) -> None:
    """Raises InvalidArgumentError naming the field for what can be told wrong without compiling it."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        message = f"{FIELD} must be one of json_schema, json_object, regex, lark"
        raise InvalidArgumentError(message, field=FIELD)
    field = field_of(grammar)
    if kind == "json_object":
        if not grammar.json_object:
            raise InvalidArgumentError(f"{field} must be true where it is given", field=field)
        return
    text: str = getattr(grammar, kind)
    size = len(text.encode())
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        message = f"{field} must have 1..{MAX_GRAMMAR_BYTES} bytes, not {size}"
        raise InvalidArgumentError(message, field=field)
    levels = 0
    if kind == "json_schema":
        levels = _schema_levels(_parsed(text, field))
    elif kind == "lark":
        levels = _lark_levels(text)
    if levels > MAX_LEVELS:
        message = f"{field}: {levels} definitions could nest in one another, at most {MAX_LEVELS} may"
        raise InvalidArgumentError(message, field=field)


def field_of(grammar: generation_pb2.Grammar) -> str:
    """The field's name in errors, for example "sampling.grammar.regex"."""
    return f"{FIELD}.{grammar.WhichOneof('kind')}"


def llguidance_source(grammar: generation_pb2.Grammar) -> str:
    """A checked grammar as llguidance takes it."""
    # Imported here: most processes never see a grammar.
    from llguidance import LLMatcher

    match grammar.WhichOneof("kind"):
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.regex)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.lark)
        case "json_schema":
            schema = _AS_OBJECTS.get(grammar.json_schema.strip(), grammar.json_schema)
        case _:
            schema = '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    except ValueError as error:  # its parser is stricter than Python's
        raise refused(grammar, str(error)) from None


def compile_limits() -> LLParserLimits:
    """Bounds of what one grammar may cost, in llguidance's units: compiling up to about 0.5 s, a mask 0.2 s.

    What real schemas need is far below: 10,000 enum values or 500 optional properties pass.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_max_items=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def refused(grammar: generation_pb2.Grammar, reason: str) -> InvalidArgumentError:
    """The error for a grammar that llguidance refuses, with its words."""
    field = field_of(grammar)
    return InvalidArgumentError(f"{field}: {library_words(reason)}", reason="GRAMMAR_REFUSED", field=field)


def library_words(reason: str) -> str:
    """llguidance's message on one line, its middle left out where it quotes a long grammar."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    if words.startswith("NoExtension"):
        return "no text that this model's tokens can make satisfies it"
    return words if len(words) <= MAX_WORDS else f"{words[:100]} … {words[100 - MAX_WORDS :]}"


def _parsed(text: str, field: str) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidArgumentError(f"{field} nests too deeply", field=field) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{field} must be JSON: {error}", field=field) from None
    if not isinstance(schema, dict | bool):
        raise InvalidArgumentError(f"{field} must be a JSON object or a boolean", field=field)
    return schema


def _schema_levels(schema: Any) -> int:
    """Containers that could lie in one another when every reference is followed once, at most."""
    deepest, references = 0, {""}
    open_values: list[tuple[Any, int]] = [(schema, 0)]
    while open_values:
        value, depth = open_values.pop()
        if not isinstance(value, dict | list):
            continue
        deepest = max(deepest, depth + 1)
        if isinstance(value, dict):
            references |= {str(value[key]) for key in _REFERENCES & value.keys()}
        children = value.values() if isinstance(value, dict) else value
        open_values += [(child, depth + 1) for child in children]
    return deepest * len(references)


def _lark_levels(text: str) -> int:
    """Rules and brackets, which could all lie in one another, and what embedded schemas add."""
    levels = len(_LEVEL_MARKS.findall(text))
    decoder = json.JSONDecoder()
    for start in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue  # llguidance refuses it as well
        levels += _schema_levels(schema)
    return levels
