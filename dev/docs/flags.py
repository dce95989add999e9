"""Which options the programs have that the docs name: `splitserve` by its own help, benches by their sources."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from dev.docs.commands import DocCommand, flags_of, pages
from dev.docs.plan import FOREIGN_FLAGS, NO_COMMAND
from launcher.cli.commands import COMMANDS
from launcher.cli.main import main as splitserve
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import settings_of
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.worker import WorkerConfig
from splitserve.runtime.process import environment_with

GROUPS = frozenset({"autoscaler", "keys", "model", "routes"})
"""Commands with subcommands."""
WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_ARGUMENT = re.compile(r"add_argument\(\s*((?:\"[^\"]*\",?\s*)+)")
_SHARED = re.compile(r"^from (\S+) import .*\badd_\w+_options\b", re.MULTILINE)
"""Options that benches share are added by functions of these names."""
_DELEGATE = re.compile(r"^from (\S+) import main$", re.MULTILINE)
_WORD = re.compile(r"^[a-z][a-z-]*$")


@cache
def splitserve_flags(*words: str) -> frozenset[str]:
    """Options of `splitserve WORDS`; empty where there is no such command."""
    shown = io.StringIO()
    with environment_with(WIDE), redirect_stdout(shown):
        with redirect_stderr(io.StringIO()):  # commands without settings have no such option
            code = splitserve([*words, "--help-all"])
        if code:
            code = splitserve([*words, "--help"])
    return frozenset(_FLAG.findall(shown.getvalue())) if code == 0 else frozenset()


@cache
def bench_flags(module: str) -> frozenset[str]:
    """Options of `python -m MODULE`; empty where there is no such module."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).read_text(encoding="utf-8")
    if delegate := _DELEGATE.search(source):
        return bench_flags(delegate[1])
    own = {flag for names in _ARGUMENT.findall(source) for flag in _FLAG.findall(names)}
    return frozenset({"--help", *own}.union(*(bench_flags(shared) for shared in _SHARED.findall(source))))


def wrong_flags(command: DocCommand) -> list[str]:
    """Problems with the options of a command."""
    if command.text in NO_COMMAND:
        return []
    return [
        f"{command.page}:{command.line}: {what}"
        for part in re.split(r" \|\|? | && |; ", command.text)
        for what in _wrong_in(part.split())
    ]


def wrong_alone(root: Path, commands: Sequence[DocCommand]) -> list[str]:
    """Options that pages mention outside commands and that no program has."""
    known = set(FOREIGN_FLAGS) | splitserve_flags()
    for command in commands:
        if command.text not in NO_COMMAND:
            known |= _flags_of_program(command.words)
    for name in COMMANDS:
        known |= splitserve_flags(name)
    known |= _setting_flags()
    return [
        f"{page.name}: no program has {flag}"
        for page in pages(root)
        for flag in sorted(flags_of(page.read_text(encoding="utf-8")) - known)
    ]


def _setting_flags() -> frozenset[str]:
    """Options of all settings, those that are hidden included."""
    kinds = (ClusterConfig, CoordinatorConfig, WorkerConfig, AutoscalerConfig)
    settings = [setting for kind in kinds for setting in settings_of(kind)]
    return frozenset(setting.flag for setting in settings)


def _wrong_in(words: Sequence[str]) -> Iterator[str]:
    known = _flags_of_program(words)
    if not known and words[0] == "splitserve":
        yield f"there is no `{' '.join(words[:2])}`"
    elif not known and words[:2] == ["python", "-m"]:
        yield f"there is no module {words[2]}"
    elif known:
        for flag in _FLAG.findall(" ".join(words)):
            if flag not in known:
                yield f"`{' '.join(words[:3])}` has no {flag}"


def _flags_of_program(words: Sequence[str]) -> frozenset[str]:
    match words:
        case ["splitserve", group, word, *_] if group in GROUPS and _WORD.match(word):
            return splitserve_flags(group, word)
        case ["splitserve", word, *_]:
            return splitserve_flags(*([word] if _WORD.match(word) else []))
        case ["python", "-m", module, *_]:
            return bench_flags(module)
    return frozenset()
