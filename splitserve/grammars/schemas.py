"""JSON Schemas reduced to what llguidance expresses exactly, and the check of answers by a validator.

llguidance ("the library") keeps numbers in 64-bit floats and implements a part of JSON Schema. A strict schema with a
keyword that the library does not express exactly is refused, with the keyword's path. From any other schema the keyword
is left out of the grammar, and only the validator checks it. A value that no grammar could spell is always refused.

A schema is strict if its `x-guidance` says `{"lenient": false}`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

OPTIONS = {"whitespace_pattern": r"[ \t]{1,32}|\r?\n[ \t]{0,32}"}
"""Between two JSON tokens at most one line break and 32 blanks, so that a model cannot spend its budget on blanks."""
STRICT = {"lenient": False}
"""The `x-guidance` of a schema that is strict."""

Check = Callable[[str], str]
"""Why a JSON text does not satisfy a schema; empty if it does."""

_MAX_EXACT = 2**53
DEFINITIONS = frozenset({"$defs", "definitions"})
MAPS = frozenset({"properties", "patternProperties", *DEFINITIONS})
"""Keywords with schemas by name."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords with lists of schemas."""
SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})
"""Keywords with a schema; `items` may be a list of them."""
_VALUES = frozenset({"const", "enum"})
_LOWER, _UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_CONDITIONS = {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
_COUNTED = {"contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
_EVALUATED = {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
_VALIDATED = frozenset(_CONDITIONS | _COUNTED | _EVALUATED)
"""Keywords that only the validator checks."""
_TIMES, _NAMES = (
    {"date", "time", "date-time", "duration"},
    {"email", "hostname", "ipv4", "ipv6", "uri", "uuid"},
)
_FORMATS = frozenset(_TIMES | _NAMES | {"unknown"})
"""The formats that the library implements; all others are annotations."""
_REFERENCES = {
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
}
_ANNOTATIONS = frozenset(_REFERENCES | {"idn-email", "idn-hostname", "regex"})
"""Those among them that the validator would check."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_UNKNOWN = re.compile(r"(?:Pointer|Anchor|Resource|Unknown meta-schema:) '([^']*)'")
"""What the validator says of a `$ref` or `$schema` that leads nowhere."""
_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")


class SchemaError(ValueError):
    """A schema that is refused; names the path in it."""


def prepared(schema: dict[str, Any] | bool, path: str = "") -> tuple[dict[str, Any], Check]:
    """A schema for the library, and the check of answers to it. `path` names it in errors.

    Raises SchemaError for a schema that is malformed, or that the library must express exactly and cannot.
    """
    if isinstance(schema, bool):
        expressed: dict[str, Any] = {} if schema else {"enum": []}
        return {**expressed, "x-guidance": OPTIONS}, lambda text: ""
    guidance = schema.get("x-guidance")
    options = {**OPTIONS, "lenient": True, **(guidance if isinstance(guidance, dict) else {})}
    try:
        expressed = _Reduction(strict=not options["lenient"]).reduced(schema, path)
    except RecursionError:
        raise SchemaError(f"{path or 'the schema'} nests too deeply") from None
    return {**expressed, "x-guidance": options}, _check_of(schema, path)


class _Reduction:
    """Leaves out keywords that the library does not express exactly; refuses them if `strict`."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict

    def reduced(self, schema: Any, path: str) -> Any:
        """The part of a schema that the library expresses."""
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            place = f"{path}.{key}" if path else key
            if key in MAPS and isinstance(value, dict):
                if key == "patternProperties" and any(map(_LOOKS_AROUND.search, value)):
                    raise SchemaError(f"{place}: look-around and back-references are not supported")
                kept[key] = {name: self.reduced(inner, f"{place}.{name}") for name, inner in value.items()}
            elif key in LISTS | SCHEMAS and isinstance(value, list):
                kept[key] = [self.reduced(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
            elif key in SCHEMAS:
                kept[key] = self.reduced(value, place)
            elif self._expresses(key, value, place):
                whole = isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT
                kept[key] = int(value) if whole and key not in _VALUES else value
        return kept

    def _expresses(self, key: str, value: Any, place: str) -> bool:
        """Whether the library gets the keyword. Raises SchemaError for one that it must express exactly and cannot."""
        if key in _VALUES:
            _require_exact(value, place)
            return True
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if not math.isfinite(number):
            raise SchemaError(f"{place}: {number} is no number of JSON")
        beyond = abs(number) > _MAX_EXACT
        if beyond and key in (_LOWER if number > 0 else _UPPER):
            raise SchemaError(f"{place}: numbers beyond 2^53 cannot be held exactly")
        exact = not (
            (beyond and key in _LOWER | _UPPER | {"multipleOf"})
            or (key == "multipleOf" and isinstance(value, float) and not value.is_integer())
            or (key == "pattern" and isinstance(value, str) and _LOOKS_AROUND.search(value))
            or (key in _VALIDATED and not (key == "uniqueItems" and value is False))
            or (key == "format" and value not in _FORMATS)
            or (key == "minProperties" and number > 1)
        )
        if exact:
            return True
        if self._strict:
            shown = json.dumps(value)
            shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
            raise SchemaError(f"{place}: {shown} cannot be held exactly, as strict asks for")
        # These two narrow the grammar without being exact, which helps the model.
        return key == "minProperties" or (key == "multipleOf" and _has_few_digits(value))


def _has_few_digits(number: float) -> bool:
    """Whether the library accepts the number as `multipleOf`."""
    digits = str(number).partition(".")[2]
    return len(digits) <= 4 and (number * 10.0 ** len(digits)).is_integer()


def _require_exact(value: Any, place: str) -> None:
    """Raises SchemaError for a number, at any depth of a value, that the library would write as another."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _require_exact(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _require_exact(inner, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{place}: {value} is no number of JSON")
    elif isinstance(value, int | float) and abs(value) > _MAX_EXACT:
        raise SchemaError(f"{place}: {value} cannot be held exactly: numbers beyond 2^53 cannot")


def _check_of(schema: dict[str, Any], path: str) -> Check:
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(
            schema,
            validate_formats=True,
            formats={name: lambda text: True for name in _ANNOTATIONS},
            offline=True,
        )
    except (jsonschema_rs.ReferencingError, ValueError, RecursionError) as error:
        place = list(map(str, getattr(error, "instance_path", None) or ()))
        message = getattr(error, "message", str(error))
        if place and place[-1] == "type" and "anyOf" in message:
            message = f"must be one of {', '.join(_TYPES)}, or a list of them"
        elif target := _UNKNOWN.search(message):
            if "meta-schema" in message:
                place, message = ["$schema"], f"{target[1]!r} is no version of JSON Schema that is known here"
            else:
                place, message = ["$ref"], f"{target[1]!r} is not in the schema, and nothing is fetched"
        where = ".".join(filter(None, (path, *place)))
        raise SchemaError(f"{where}: {message}" if where else message) from None

    def check(text: str) -> str:
        try:
            # Decimals are exact and unbounded, as the grammar's numbers are.
            value = json.loads(text, parse_float=Decimal)
            violation = next(validator.iter_errors(value), None)
        except (ValueError, ArithmeticError, RecursionError) as error:
            return f"the answer cannot be checked: {error}"
        if violation is None:
            return ""
        where = ".".join(map(str, violation.instance_path))
        return f"the answer does not satisfy the schema{f' at {where}' if where else ''}: {violation.message}"

    return check
