"""The forms of a grammar: what is checked without compiling it, and the errors that name its field."""

from __future__ import annotations

import json

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2

FIELD = "sampling.grammar"
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_WORDS = 400


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
    if kind == "json_schema":
        _check_json(text, field)


def field_of(grammar: generation_pb2.Grammar) -> str:
    """The grammar's field name in errors, for example "sampling.grammar.regex"."""
    return f"{FIELD}.{grammar.WhichOneof('kind')}"


def refused(grammar: generation_pb2.Grammar, reason: str) -> InvalidArgumentError:
    """The error for a grammar that does not compile, with the compiler's message."""
    field = field_of(grammar)
    return InvalidArgumentError(f"{field}: {summarize_error(reason)}", reason="GRAMMAR_REFUSED", field=field)


def summarize_error(reason: str) -> str:
    """llguidance's message on one line, with the middle elided if it is long."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    if words.startswith("NoExtension"):
        return "no text that this model's tokens can make satisfies it"
    return words if len(words) <= MAX_WORDS else f"{words[:100]} … {words[100 - MAX_WORDS :]}"


def _check_json(text: str, field: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidArgumentError(f"{field} nests too deeply", field=field) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{field} must be JSON: {error}", field=field) from None
    if not isinstance(schema, dict | bool):
        raise InvalidArgumentError(f"{field} must be a JSON object or a boolean", field=field)
