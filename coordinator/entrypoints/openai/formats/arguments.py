"""Turns arguments that a model writes one by one, as plain text, into JSON by the schema of the function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

quoted = json.encoder.encode_basestring
"""Encodes a text as a JSON string without ASCII escapes: the C function below `json.dumps`, 20 times faster."""
Schema = Mapping[str, Any]
MAX_SCHEMAS = 64
"""Most schemas that are looked at for one argument; references may form a circle."""
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
    """The JSON of one argument: a string where the schema of the function says so, or where the text is no JSON."""
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


def kinds_of(schema: Any, root: Schema) -> set[str]:
    """The JSON types of the values that a schema accepts; none if the schema does not say. `root`: the schema that
    references start from."""
    kinds: set[str] = set()
    schemas: list[Any] = [schema]
    for _ in range(MAX_SCHEMAS):
        if not schemas:
            break
        schema = schemas.pop()
        if not isinstance(schema, Mapping):
            continue
        kind = schema.get("type")
        if isinstance(kind, str | list):
            kinds.update([kind] if isinstance(kind, str) else map(str, kind))
            continue
        for value in [schema["const"]] if "const" in schema else _listed(schema.get("enum")):
            kinds |= _KINDS.get(type(value), frozenset())
        for key in ("anyOf", "oneOf", "allOf"):
            schemas += _listed(schema.get(key))
        schemas.append(_target(schema.get("$ref"), root))
    return kinds


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Schema) -> Any:
    """The schema that a reference of the form `#/key/key` leads to; None without one."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    schema: Any = root
    for key in reference[2:].split("/"):
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
