"""Why a grammar cannot hold a JSON Schema, in the words of its author: the path, and the keywords there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from splitserve.grammars.schemas import DEFINITIONS, LISTS, MAPS, SCHEMAS

LOCATING_CPU_S = 0.03
"""CPU time after which a cause is sought no deeper: a hostile schema must not cost much more than its compilation."""
MAX_SHOWN = 40
"""Most characters of a keyword's value in a message."""
_HINTS = {
    "pattern": "look-around, back-references, word boundaries and anchors inside of it are not supported",
    "oneOf": "its alternatives must differ in type or in a constant; anyOf needs no such difference",
}

ErrorOf = Callable[[Mapping[str, Any]], str]
"""The compiler's error for a schema; empty if the schema compiles."""


def refusal_of(schemas: Mapping[str, Mapping[str, Any]], error: str, error_of: ErrorOf) -> str:
    """Why the first of these schemas that does not compile is refused; `error`, the compiler's own, if all compile or
    time is short. `schemas`: by path. The cause is sought by compiling parts of them."""
    until_s = time.process_time() + LOCATING_CPU_S
    # First those whose names stand in the error.
    for path in sorted(schemas, key=lambda path: path not in error):
        if time.process_time() > until_s:
            break
        if own_error := error_of(schemas[path]):
            return _refusal(schemas[path], path, own_error, error_of, until_s)
    return error


def _refusal(schema: Mapping[str, Any], path: str, error: str, error_of: ErrorOf, until_s: float) -> str:
    part = schema
    options = {"x-guidance": schema.get("x-guidance")}
    if of_options := error_of(options):
        return f"{_place(path, 'x-guidance')}: {of_options}"
    shared = {key: schema[key] for key in (*DEFINITIONS, "x-guidance") if key in schema}
    # 1. The innermost part that has an error of this kind by itself.
    found = True
    while found:
        found = False
        for name, inner in _parts(part):
            if time.process_time() > until_s:
                break
            inner_error = error_of({**shared, **inner})
            if inner_error and _is_contradiction(inner_error) == _is_contradiction(error):
                part, path, error, found = inner, _place(path, name), inner_error, True
                break
    # 2. The keywords without which it has none.
    keywords = []
    for key in part:
        rest = {other: value for other, value in part.items() if other != key}
        if time.process_time() <= until_s and not error_of({**shared, **rest}):
            keywords.append(key)
    return _worded(part, path, keywords, error)


def _is_contradiction(error: str) -> bool:
    return "Unsatisfiable" in error


def _worded(part: Mapping[str, Any], path: str, keywords: list[str], error: str) -> str:
    if _is_contradiction(error):
        if len(keywords) > 2:  # another type always escapes a contradiction between the others
            keywords = [keyword for keyword in keywords if keyword != "type"]
        return f"{path or 'the schema'}: no value satisfies {' and '.join(keywords[:4]) or 'it'}"
    if any(sign in error for sign in ("too large", "too big", "too many", "fuel")):
        return f"{path or 'the schema'} is too large for a grammar"
    if not keywords:
        return f"{path or 'the schema'} cannot be held by a grammar"
    keyword = keywords[0]
    place = _place(path, keyword)
    shown = json.dumps(part[keyword], ensure_ascii=False)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
    hint = f": {_HINTS[keyword]}" if keyword in _HINTS else ""
    return f"{place}: {shown} cannot be held by a grammar{hint}"


def _place(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside of a schema with their paths, definitions last: another part may lead to them."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] in DEFINITIONS):
        inner: list[tuple[str, Any]] = []
        if key in MAPS and isinstance(value, dict):
            inner = [(f"{key}.{name}", each) for name, each in value.items()]
        elif key in LISTS | SCHEMAS and isinstance(value, list):
            inner = [(f"{key}[{number}]", each) for number, each in enumerate(value)]
        elif key in SCHEMAS:
            inner = [(key, value)]
        yield from ((name, each) for name, each in inner if isinstance(each, dict))
