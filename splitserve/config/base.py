"""Bases of what configures processes: `ConfigModel`, `Settings`, `Option` and merging.

Settings are validated and frozen; they are read once at start. A field of a settings model is the only declaration
of a setting: type, bounds, default and meaning. `splitserve/config/command_line.py` derives its command-line option,
environment variable, help text and its entry in docs/reference/configuration.md; `Option` overrides the derived names.
A command's YAML file contains the fields of its settings, with sections as nested mappings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from splitserve.addresses import MAX_PORT, check_address
from splitserve.config.yaml_file import read_yaml_file, what_is_wrong
from splitserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """Overrides of a setting's derived option and variable; used in `Annotated`.

    A section with a `flag` is a single option, whose text form is defined by its validator and serializer.
    """

    flag: str | None = None
    """Name of the option, without leading dashes."""
    metavar: str | None = None
    """Placeholder of the value in the help text."""
    env: str | None = None
    """Name of the environment variable."""
    tier: Literal["basic", "advanced", "internal"] = "advanced"
    """`basic`: shown by `--help`; `advanced`: by `--help-all`; `internal`: by neither, for tests and benches."""


BASIC, INTERNAL = Option(tier="basic"), Option(tier="internal")


class ConfigModel(BaseModel):
    """Base of settings and of what the policy and tenants files hold: frozen, no unknown fields, and each field's
    docstring is its description. A number is no boolean: pydantic takes `true` for 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Raises ValueError for a boolean where the field, or an item in it, is a number. A field that may also be text
        or a boolean checks its values itself."""
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
        if any(isinstance(item, bool) for item in items):
            kinds = _kinds_within(cls, info.field_name or "")
            if kinds & {int, float} and not kinds & {bool, str}:
                raise ValueError("must be a number, not true or false")
        return value


@cache
def _kinds_within(model: type[ConfigModel], name: str) -> frozenset[Any]:
    """The types that a field's annotation is built of, except those of keys."""
    left: list[Any] = [model.model_fields[name].annotation]
    kinds: set[Any] = set()
    while left:
        kind = left.pop()
        origin, parts = get_origin(kind), get_args(kind)
        if origin is Annotated:
            parts = parts[:1]
        elif origin in (dict, Mapping):
            parts = parts[1:]
        left.extend(parts)
        kinds.update(() if parts else {kind})
    return frozenset(kinds)


class Settings(ConfigModel):
    """Base of all settings."""

    without_options: ClassVar[tuple[str, ...]] = ()
    """Paths of sections and settings that a command line leaves to files and variables."""


def option_of(field: FieldInfo) -> Option:
    """The field's `Option`, annotated on its type or on a member of its union; an empty one if there is none."""
    members = [item for member in get_args(field.annotation) for item in getattr(member, "__metadata__", ())]
    return next((item for item in (*field.metadata, *members) if isinstance(item, Option)), _NO_OVERRIDES)


_NO_OVERRIDES = Option()

Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Cost = Annotated[float, Field(ge=0)]
CoordinatorAddress = Annotated[str, AfterValidator(lambda address: check_address(address, "coordinator"))]


S = TypeVar("S", bound=Settings)


def merge_settings(kind: type[S], values: dict[str, Any], *layers: Mapping[str, Any]) -> S:
    """Builds settings from nested values and layers on top of them. Later layers win; None means not given.

    Raises ConfigError naming the first invalid field and its bound.
    """
    for layer in layers:
        _merge(values, layer)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or kind.__name__
        given = "" if first["type"] == "missing" else f" (given: {first.get('input')!r})"
        raise ConfigError(f"{field}: {what_is_wrong(first)}{given}", field=field) from None


def idle_among(**settings: tuple[bool, str]) -> dict[str, str]:
    """The settings that were given and have no effect beside the others, with the reason. `settings`: by name, with
    `__` for dots, whether the setting is idle, and why. Idle settings are no error: processes share files and
    variables."""
    return {name.replace("__", "."): why for name, (is_idle, why) in settings.items() if is_idle}


def read_settings_file(path: Path) -> dict[str, Any]:
    """The unvalidated mapping in a YAML settings file. Call it before there is an event loop. Raises ConfigError if it
    cannot be read or is no mapping."""
    return read_yaml_file(path).values


def _merge(into: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if value is None:
            continue
        if isinstance(value, dict):
            section = into.setdefault(key, {})
            if isinstance(section, dict):
                _merge(section, value)
                continue
        into[key] = value
