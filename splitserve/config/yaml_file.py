"""Reads a YAML file whose errors name the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import override

from splitserve.errors import ConfigError
from splitserve.runtime.bounded_file import SMALL_FILE_BYTES, read_named_text

M = TypeVar("M", bound=BaseModel)
SCALAR_ERRORS = (ValueError, OverflowError, RecursionError, TypeError)
"""What YAML's constructors raise for a value of valid syntax without a meaning, such as the date 2026-02-30."""


_BOOL_TAG = "tag:yaml.org,2002:bool"
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _LineLoader(yaml.SafeLoader):
    """Reports the line of a value that cannot be constructed, and of a repeated key, of which YAML would silently take
    the last; `<<`, which merges, may be repeated. Only `true` and `false` are booleans, as in YAML 1.2: a setting may
    be `on` or `off`."""

    @override
    def compose_mapping_node(self, anchor: Any) -> Any:
        """Raises ConstructorError for a repeated key."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                name = (key.tag, key.value)
                if name in lines:
                    problem = f"the key {key.value[:80]!r} is there already, in line {lines[name] + 1}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                lines[name] = key.start_mark.line
        return node

    @override
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except SCALAR_ERRORS as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


_LineLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != _BOOL_TAG]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_LineLoader.add_implicit_resolver(
    _BOOL_TAG, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A YAML file that holds a mapping."""

    path: Path
    values: dict[str, Any]
    """Empty for an empty file."""
    root: Any
    """The file as YAML nodes, which know their lines; None for an empty file."""

    def line_of(self, field: str | None) -> int:
        """The line, from 1, of a dotted field such as "tenants.0.name", or of the closest part of it that exists."""
        node, line = self.root, 1
        for part in (field or "").split("."):
            entry = _entry(node, part)
            if entry is not None:
                line, node = entry
        return line

    @contextmanager
    def naming_lines(self) -> Iterator[None]:
        """Adds path and line to ConfigErrors raised in the context; the errors' fields name places in this file."""
        try:
            yield
        except ConfigError as error:
            where = f"{self.path}, line {self.line_of(error.field)}"
            raise ConfigError(f"{where}: {error.message}", field=error.field) from None

    def validated(self, kind: type[M], whole: str) -> M:
        """The file as a model. Raises ConfigError naming the first bad field, or `whole`; its value is not repeated."""
        try:
            return kind.model_validate(self.values)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or whole
            raise ConfigError(f"{place}: {what_is_wrong(first)}", field=place) from None


def what_is_wrong(error: ErrorDetails) -> str:
    """An error of validation in words for people."""
    return "there is no such setting" if error["type"] == "extra_forbidden" else error["msg"]


def read_yaml_file(path: Path, setting: str = "config", *, most_bytes: int = SMALL_FILE_BYTES) -> YamlFile:
    """Raises ConfigError, naming the `setting` that led to the file and the line where there is one, if the file cannot
    be read or holds no mapping."""
    text = read_named_text(path, setting, most_bytes)
    try:
        loader = _LineLoader(text)
        try:
            root = loader.get_single_node()
            data = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        why = error.problem or error.context or "cannot be parsed"
        raise ConfigError(f"{setting}: {path}{where}: not valid YAML: {why}", field=setting) from None
    except (yaml.YAMLError, *SCALAR_ERRORS) as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"{setting}: {path} is not valid YAML: {why}", field=setting) from None
    if data is None:
        return YamlFile(path, {}, None)
    if not isinstance(data, dict):
        raise ConfigError(f"{setting}: {path} must hold a mapping", field=setting)
    return YamlFile(path, data, root)


def _entry(node: Any, part: str) -> tuple[int, Any] | None:
    """Line and node of an entry of a mapping or a list; None if it has no such entry."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == part:
                return key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        value = node.value[int(part)]
        return value.start_mark.line + 1, value
    return None
