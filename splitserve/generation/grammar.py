"""Grammars of structured output: bounds, conversion for llguidance, and a thread to compile them on.

Grammars come from clients and are compiled by native code that recurses into nested definitions. The library
bounds neither size nor nesting, so both are checked here first.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions


FIELD = "sampling.grammar"
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_LEVELS = 16_384
"""Bound on the nesting depth of definitions. Compiling takes up to 4 KiB of stack per level."""

STACK_BYTES = 128 * 2**20
"""Stack size of the compiling thread, enough for MAX_LEVELS; only touched pages take memory."""

MAX_WORDS = 400
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t]{1,32}|\r?\n[ \t]{0,32}"}
"""Between two JSON tokens at most one line break and 32 blanks, so that a model cannot spend its budget on blanks."""

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_AS_OBJECTS = {"true": "{}", "false": '{"enum": []}'}
"""Object forms of the boolean schemas, which llguidance's options do not support."""
_LEVEL_MARKS = re.compile(r"[:(\[{~]")
_EMBEDDED_SCHEMA = re.compile(r"%json\s*")


def load_compiler() -> None:
    """Imports llguidance now. Loading its library takes up to 0.2 s, in which no other thread runs."""
    import llguidance  # noqa: F401


def check_grammar(grammar: generation_pb2.Grammar) -> None:
    """Raises InvalidArgumentError naming field and bound for errors that need no compilation."""
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
    """The grammar's field name in errors, for example "sampling.grammar.regex"."""
    return f"{FIELD}.{grammar.WhichOneof('kind')}"


def llguidance_source(grammar: generation_pb2.Grammar) -> str:
    """Converts a checked grammar to llguidance's form."""
    # Imported lazily: most processes never see a grammar.
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
    """Cost limits of one grammar, in llguidance's units: about 0.5 s to compile, 0.2 s for a mask.

    Real schemas stay far below: 10,000 enum values or 500 optional properties pass.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_max_items=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def refused(grammar: generation_pb2.Grammar, reason: str) -> InvalidArgumentError:
    """The error for a grammar that llguidance refuses, with its message."""
    field = field_of(grammar)
    return InvalidArgumentError(f"{field}: {summarize_error(reason)}", reason="GRAMMAR_REFUSED", field=field)


def summarize_error(reason: str) -> str:
    """llguidance's message on one line, with the middle elided if it is long."""
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
    """Upper bound on nested containers when every reference is followed once."""
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
    """Upper bound on nesting: all rules and brackets, plus the levels of embedded schemas."""
    levels = len(_LEVEL_MARKS.findall(text))
    decoder = json.JSONDecoder()
    for start in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue  # llguidance refuses it, too
        levels += _schema_levels(schema)
    return levels


T = TypeVar("T")

_stack_size_lock = threading.Lock()


class GrammarThread:
    """One thread with a large stack, started at first use. Compiling one grammar at a time bounds the load."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on the thread, after earlier work; returns its result or raises its exception."""
        return await asyncio.wrap_future(self.executor().submit(work))

    def executor(self) -> ThreadPoolExecutor:
        """The executor, with its thread started."""
        if self._executor is None:
            executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            # The stack size is a process-wide setting that a thread takes when it starts.
            with _stack_size_lock:
                before = threading.stack_size(STACK_BYTES)
                try:
                    executor.submit(bool).result()
                finally:
                    threading.stack_size(before)
            self._executor = executor
        return self._executor
