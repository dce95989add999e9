"""Whether the Kubernetes API would take a document, by the models of its Python client: those are made from the OpenAPI
description of the API. What fields mean to each other is not looked at."""

from __future__ import annotations

import re
from typing import Any

from kubernetes import client

_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def check_document(document: dict[str, Any]) -> None:
    """Raises AssertionError, naming the field, for one that is unknown, missing or of another type."""
    version, kind = document["apiVersion"].rpartition("/")[2], document["kind"]
    name = version.capitalize() + kind
    assert getattr(client, name, None), f"the API has no {kind} of {document['apiVersion']}"
    _check(kind, name, _with_words(document))


def _with_words(value: Any, inside: str = "") -> Any:
    """With quantities as words: the API takes numbers as well, the models do not."""
    if isinstance(value, dict):
        return {
            key: _with_words(item, key if inside not in ("resources", "quantities") else "quantities")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_words(item) for item in value]
    return str(value) if inside == "quantities" else value


def _check(where: str, wanted: str, value: Any) -> None:
    """`wanted` is a type as the client's models name it."""
    if wanted == "object":
        return
    if wanted in _PLAIN:
        assert isinstance(value, _PLAIN[wanted]), f"{where}: {value!r} is no {wanted}"
        assert wanted == "bool" or not isinstance(value, bool), f"{where}: {value!r} is no {wanted}"
        return
    if found := re.fullmatch(r"[Ll]ist\[(.+)\]", wanted):
        assert isinstance(value, list), f"{where}: {value!r} is no list"
        for number, item in enumerate(value):
            _check(f"{where}[{number}]", found[1], item)
        return
    assert isinstance(value, dict), f"{where}: {value!r} is no mapping"
    if found := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", wanted):
        for key, item in value.items():
            _check(f"{where}.{key}", found[1], item)
        return
    _check_fields(where, getattr(client, wanted), value)


def _check_fields(where: str, model: Any, value: dict[str, Any]) -> None:
    fields = {name: field for field, name in model.attribute_map.items()}
    for name, item in value.items():
        assert name in fields, f"{where}: no field {name} in {model.__name__}"
        _check(f"{where}.{name}", model.openapi_types[fields[name]], item)
    try:
        model(**{fields[name]: item for name, item in value.items()})  # it asks for what is required
    except ValueError as error:
        raise AssertionError(f"{where}: {error}") from None
