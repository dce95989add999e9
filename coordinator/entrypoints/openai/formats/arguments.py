"""Arguments that a model writes as plain text, one by one, as JSON: the function's schema says what is a string."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any]
MAX_REFERENCES = 64
"""Schemas that are looked at for one argument."""
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
}


def typed(text: str, parameters: Schema | None, name: str) -> str:
    """The JSON of one argument. It is a string where the function's schema says so, or where it is nothing else."""
    properties = (parameters or {}).get("properties")
    kinds = kinds_of(properties.get(name) if isinstance(properties, Mapping) else None, parameters or {})
    if kinds == {"string"}:
        return quoted(text)
    written = _LITERALS.get(text.strip(), text.strip())
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    fits = not kinds or kinds & _KINDS[type(value)]
    return written if fits or "string" not in kinds else quoted(text)


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def kinds_of(schema: Any, root: Schema) -> set[str]:
    """The types of values that a schema takes; none if it does not say. `root`: what its references are in."""
    return set(_kinds(schema, root))


def _kinds(schema: Any, root: Schema) -> Iterator[str]:
    waiting: list[Any] = [schema]
    for _ in range(MAX_REFERENCES):
        if not waiting:
            return
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        if isinstance(kind, str | list):
            yield from [kind] if isinstance(kind, str) else (str(each) for each in kind)
            continue
        for value in [one["const"]] if "const" in one else _listed(one.get("enum")):
            yield from _KINDS.get(type(value), ())
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(one.get(key))
        waiting.append(_target(one.get("$ref"), root))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Schema) -> Any:
    """What a reference within the schema means; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for key in reference[2:].split("/"):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
