"""Random JSON Schemas whose answers are bounded, with everything that real ones use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from splitserve.grammars.child import GrammarRefusedError, LibraryGrammar
from splitserve.grammars.schemas import STRICT, SchemaError

Schema = dict[str, Any]

NAMES = ["id", "name", "age", "tags", "email", "size", "über", "a b", 'quo"te', "next_step", "x"]
PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z][0-9]{3}$",
    "^(red|green|blue)-[0-9a-f]{4}$",
    "^\\d{3}-\\d{2}$",
    "^[^\\n]{0,8}$",
]
FORMATS = ["date", "ipv4", "uuid"]
VALUES = ["alpha", "Beta", "日本", "", 0, -7, 12.5, True, False, None, 'a"b', [1, 2], {"k": "v"}]
DEPTH = 3


def schemas(seed: int, count: int) -> list[Schema]:
    """So many different schemas that compile."""
    pick = random.Random(seed)
    found: dict[str, Schema] = {}
    while len(found) < count:
        made = _document(pick)
        if str(made) not in found and _compiles(made):
            found[str(made)] = made
    return list(found.values())


def _compiles(schema: Schema) -> bool:
    try:
        LibraryGrammar("json_schema", json.dumps({**schema, "x-guidance": STRICT}), None)
    except (GrammarRefusedError, SchemaError):
        return False
    return True


def _document(pick: random.Random) -> Schema:
    defs = {
        name: _value(pick, DEPTH - 1, ())
        for name in pick.sample(["item", "point", "who"], pick.randint(0, 2))
    }
    made = pick.choice([_object, _object, _array, _any_of])(pick, DEPTH, tuple(defs))
    if defs:
        made["$defs"] = defs
    return made


def _value(pick: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    kinds = [_string, _integer, _enum, _plain]
    if depth > 0:
        kinds += [_object, _array, _any_of]
    if defs and pick.random() < 0.3:
        return {"$ref": f"#/$defs/{pick.choice(defs)}"}
    return pick.choice(kinds)(pick, depth, defs)


def _object(pick: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    names = pick.sample(NAMES, pick.randint(1, 4))
    required = [name for name in names if pick.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(pick, depth - 1, defs) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(pick: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    least = pick.randint(0, 2)
    if pick.random() < 0.2:
        items = [_value(pick, depth - 1, defs) for _ in range(pick.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    most = least + pick.randint(0, 2)
    return {"type": "array", "items": _value(pick, depth - 1, defs), "minItems": least, "maxItems": most}


def _any_of(pick: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(pick, depth - 1, defs) for _ in range(pick.randint(2, 3))]}


def _string(pick: random.Random, _depth: int, _defs: tuple[str, ...]) -> Schema:
    match pick.randrange(3):
        case 0:
            return {"type": "string", "pattern": pick.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": pick.choice(FORMATS)}
        case _:
            least = pick.randint(0, 5)
            return {"type": "string", "minLength": least, "maxLength": least + pick.randint(0, 10)}


def _integer(pick: random.Random, _depth: int, _defs: tuple[str, ...]) -> Schema:
    low = pick.randint(-1000, 1000)
    made: Schema = {"type": "integer", "minimum": low, "maximum": low + pick.randint(0, 5000)}
    if pick.random() < 0.2:
        made = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 50, "multipleOf": 5}
    return made


def _enum(pick: random.Random, _depth: int, _defs: tuple[str, ...]) -> Schema:
    if pick.random() < 0.3:
        return {"const": pick.choice(VALUES)}
    return {"enum": pick.sample(VALUES, pick.randint(1, 4))}


def _plain(pick: random.Random, _depth: int, _defs: tuple[str, ...]) -> Schema:
    return {"type": pick.choice(["boolean", "null", ["boolean", "null"]])}


def described(schemas: list[Schema]) -> dict[str, int]:
    """How many of the schemas use each keyword."""
    counts: dict[str, int] = {}
    for schema in schemas:
        for keyword in set(_keywords(schema)):
            counts[keyword] = counts.get(keyword, 0) + 1
    return counts


def _keywords(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _keywords(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keywords(inner)
