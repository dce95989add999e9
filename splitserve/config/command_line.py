"""Derives command-line options and environment variables from the settings models.

The rule, which an `Option` on a field may override: the option is named after the field, without `_s` for seconds and
without the names of sections. The variable is SPLITSERVE_ plus the field's path, for example
SPLITSERVE_ENGINE_DTYPE. The help text is the first sentence of the field's docstring and the default. Precedence:
option, variable, file, default.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from splitserve.config.base import Option, Settings, merge_settings, option_of, read_settings_file

CONFIG_HELP = "YAML file of settings; options override it."
EPILOG = (
    "Settings also come from the file and from variables, for example SPLITSERVE_HOST, which win over the file; "
    "options win over both. All settings: docs/reference/configuration.md."
)
SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
"""Kubernetes sets variables such as SPLITSERVE_HTTP_PORT=tcp://10.0.0.1:80 for services; these are ignored."""
TIERS = ("basic", "advanced", "internal")
_SEPARATOR = "__"
_KINDS = {int: "INTEGER", float: "NUMBER", Path: "FILE", str: "TEXT"}

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a command: a plain field, or a section that is a single option."""

    path: str
    """The names of its sections and its own, joined by dots."""
    field: FieldInfo
    option: Option

    @property
    def name(self) -> str:
        """The field's name."""
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The option, for example `--block-size`."""
        return f"--{self.option.flag or self.name.removesuffix('_s').replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable, for example `SPLITSERVE_ENGINE_DTYPE`."""
        return self.option.env or f"SPLITSERVE_{self.path.replace('.', '_').upper()}"

    @property
    def parameter(self) -> str:
        """Name of the command function's parameter."""
        return self.path.replace(".", _SEPARATOR)

    @property
    def is_switch(self) -> bool:
        """Whether it is a boolean, given as `--x` or `--no-x`."""
        return bool in _members(self.field.annotation)

    @property
    def is_repeated(self) -> bool:
        """Whether its option may be repeated; in its variable, items are separated by white space."""
        text = next(
            (entry.return_type for entry in self.field.metadata if isinstance(entry, PlainSerializer)), None
        )
        return get_origin(text or self.field.annotation) in (tuple, list)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help text."""
        if self.option.metavar is not None:
            return self.option.metavar
        members = _members(self.field.annotation)
        choices = [str(choice) for member in members for choice in get_args(member)]
        if choices and all(get_origin(member) is Literal for member in members):
            return "|".join(choices)
        if self.name.endswith("_s"):
            return "SECONDS"
        return "BYTES" if self.name.endswith("_bytes") else _KINDS.get(members[0], "TEXT")

    @property
    def help(self) -> str:
        """First sentence of the field's docstring, its default, and its variable if that is overridden."""
        text = " ".join((self.field.description or "").split())
        parts = [re.split(r"(?<=\.)\s", text, maxsplit=1)[0], default_text(self.field)]
        if self.is_repeated:
            parts.insert(1, "Repeatable.")
        if self.option.env is not None:
            parts.append(f"Variable: {self.option.env}.")
        return " ".join(part for part in parts if part)


def settings_of(kind: type[Settings], inside: str = "") -> Iterator[Setting]:
    """All settings of a model, own fields before inherited ones; sections are expanded in place."""
    own = inspect.get_annotations(kind)
    for name, field in sorted(kind.model_fields.items(), key=lambda item: item[0] not in own):
        option = option_of(field)
        section = _section(field)
        if section is None or option.flag is not None:
            yield Setting(inside + name, field, option)
        else:
            yield from settings_of(section, f"{inside}{name}.")


def default_text(field: FieldInfo) -> str:
    """The default for people: the model's value, or the docstring's "Default: ..." if the model has none."""
    default = field.get_default(call_default_factory=True)
    if field.is_required() or default is None or default in ("", (), {}) or isinstance(default, Settings):
        stated = re.search(r"Default: .+?\.(?=\s|$)", " ".join((field.description or "").split()))
        return stated[0] if stated else "Required." if field.is_required() else ""
    if isinstance(default, bool):
        return f"Default: {'yes' if default else 'no'}."
    if isinstance(default, tuple):
        return f"Default: {' '.join(str(item) for item in default)}."
    return f"Default: {default:g}." if isinstance(default, float) else f"Default: {default}."


def command(
    kind: type[S],
    run: Callable[..., None],
    *,
    defaults: Mapping[str, Any] | None = None,
    beside: Sequence[inspect.Parameter] = (),
) -> Callable[..., None]:
    """A Typer command with the options of `options_of`, which calls `run` with the settings.

    `--help` shows the basic settings, `--help-all` the advanced ones too.

    `defaults`: values of lowest precedence, below the file. `beside`: additional parameters, passed to `run` by name.
    """

    def invoke(config: Path | None, help_all: bool = False, **given: Any) -> None:
        others = {parameter.name: given.pop(parameter.name) for parameter in beside}
        values = {**(defaults or {}), **(read_settings_file(config) if config else {})}
        run(merge_settings(kind, values, variables_given(kind, os.environ), overrides(given)), **others)

    chosen = options_of(kind)
    basic = [_parameter(setting) for setting in chosen if setting.option.tier == "basic"]
    others = [_parameter(setting) for setting in chosen if setting.option.tier != "basic"]
    config = optional("config", Path, typer.Option(metavar="FILE", help=CONFIG_HELP))
    advanced = {setting.parameter for setting in chosen if setting.option.tier == "advanced"}
    parameters = [*basic, *beside, config, _help_all(advanced), *others]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return invoke


def options_of(kind: type[Settings]) -> list[Setting]:
    """The settings that have an option, sorted by tier. Of several settings with one flag, only the first has it."""
    by_flag: dict[str, Setting] = {}
    for setting in settings_of(kind):
        if not setting.path.startswith(kind.without_options):
            by_flag.setdefault(setting.flag, setting)
    return sorted(by_flag.values(), key=lambda setting: TIERS.index(setting.option.tier))


def _help_all(advanced: Collection[str]) -> inspect.Parameter:
    """The option `--help-all`, which shows the parameters in `advanced` beside those of `--help`."""

    def show(ctx: typer.Context, wanted: bool) -> None:
        if wanted:
            for parameter in ctx.command.params:
                if parameter.name in advanced:
                    parameter.hidden = False  # type: ignore[attr-defined]
            typer.echo(ctx.get_help())
            raise typer.Exit

    option = typer.Option("--help-all", is_eager=True, callback=show, help="Show all options and exit.")
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter values, nested by section. None and empty sequences mean not given."""
    nested: dict[str, Any] = {}
    for parameter, value in given.items():
        if value is not None and value not in ([], ()):
            _put(nested, parameter.split(_SEPARATOR), value)
    return nested


def variables_given(kind: type[Settings], environment: Mapping[str, str]) -> dict[str, Any]:
    """Values from the environment, nested by section. Empty variables mean not given."""
    nested: dict[str, Any] = {}
    for setting in settings_of(kind):
        text = environment.get(setting.variable, "")
        if text and not text.startswith(SERVICE_LINKS):
            _put(nested, setting.path.split("."), text.split() if setting.is_repeated else text)
    return nested


def arguments(config: Settings) -> list[str]:
    """The command-line arguments that reproduce these settings, without defaults."""
    values = config.model_dump(exclude_defaults=True)
    return [argument for setting in settings_of(type(config)) for argument in _arguments(setting, values)]


def _arguments(setting: Setting, values: Mapping[str, Any]) -> list[str]:
    value: Any = values
    for key in setting.path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    match value:
        case None:
            return []
        case bool():
            return [setting.flag if value else _negative(setting.flag)]
        case list() | tuple():
            return [argument for item in value for argument in (setting.flag, str(item))]
    return [setting.flag, str(value)]


def optional(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """A command parameter with this `typer.Option`; None if not given."""
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameter(setting: Setting) -> inspect.Parameter:
    """The setting's parameter. Values stay strings; the model validates them."""
    about: dict[str, Any] = {"help": setting.help, "hidden": setting.option.tier != "basic"}
    flag, kind = setting.flag, list[str] if setting.is_repeated else str
    if setting.is_switch:
        flag = f"{flag}/{_negative(flag)}"
    else:
        about["metavar"] = setting.metavar
    return optional(setting.parameter, bool if setting.is_switch else kind, typer.Option(flag, **about))


def _put(nested: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, name = path
    for section in sections:
        nested = nested.setdefault(section, {})
    nested[name] = value


def _negative(flag: str) -> str:
    return f"--no-{flag.removeprefix('--')}"


def _section(field: FieldInfo) -> type[Settings] | None:
    """The settings model of a section; None for a plain field."""
    members = _members(field.annotation)
    return next((kind for kind in members if isinstance(kind, type) and issubclass(kind, Settings)), None)


def _members(annotation: Any) -> list[Any]:
    """The member types of a field's annotation, without None and without `Annotated` metadata."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _members(member)]
    return [] if annotation is type(None) else [annotation]
