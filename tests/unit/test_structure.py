"""The rooms of the repository: their size, their names, and which way imports run.

Folders are the map that people find their way by; see docs/internals/reading-guide.md.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "splitserve",
    "coordinator",
    "prefill_worker",
    "decode_worker",
    "worker",
    "kv_transfer",
    "engine",
    "autoscaler",
    "launcher",
)
PACKAGES = (*PRODUCT, "bench", "dev")
GENERATED = ("splitserve/v1", "splitserve/kserve")
MAX_MODULES = 15


def modules(*packages: str) -> Iterator[Path]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith(GENERATED):
                yield path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_folder_is_crowded() -> None:
    counts = Counter(
        shown(path.parent)
        for path in modules(*PACKAGES, "tests")
        if path.name not in ("__init__.py", "conftest.py")
    )
    crowded = {
        folder: count
        for folder, count in counts.items()
        if count > MAX_MODULES and not folder.startswith("tests/integration")
    }
    assert not crowded


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in modules(*PACKAGES):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(shown(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def _imports(path: Path, names: dict[str, Path]) -> set[Path]:
    """What a module imports, at its top, for types only, or inside a function."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        else:
            continue
        found |= {names[name] for name in wanted if name in names}
    return found - {path}


def _circles(edges: dict[Path, set[Path]]) -> list[list[str]]:
    """Strongly connected components of more than one module; Tarjan's algorithm (1972)."""
    order: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    circles = []

    def visit(module: Path) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                circles.append(sorted(map(shown, group)))

    for module in edges:
        if module not in order:
            visit(module)
    return circles


def test_imports_run_in_no_circle() -> None:
    names = {
        shown(path)[:-3].replace("/", "."): path for path in modules(*PACKAGES) if path.name != "__init__.py"
    }
    assert not _circles({path: _imports(path, names) for path in names.values()})


def _room(path: Path) -> Path:
    """The room of a module: its folder below the package, or itself where it stands in the package's own folder."""
    package, first, *_ = path.relative_to(ROOT).parts
    return ROOT / package / first


def test_rooms_import_each_other_one_way() -> None:
    """No circle of rooms, and so no pair of rooms that import each other."""
    names = {
        shown(path)[:-3].replace("/", "."): path for path in modules(*PACKAGES) if path.name != "__init__.py"
    }
    edges: dict[Path, set[Path]] = defaultdict(set)
    for path in names.values():
        rooms = {
            _room(other)
            for other in _imports(path, names)
            if other.relative_to(ROOT).parts[0] == path.relative_to(ROOT).parts[0]
        }
        edges[_room(path)] |= rooms - {_room(path)}
    assert not _circles(
        {room: edges.get(room, set()) for room in {*edges, *chain.from_iterable(edges.values())}}
    )


def test_the_import_contract_has_no_exception() -> None:
    """Each layer of `[tool.importlinter]` covers all that stands in it, and ignores no import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    for contract in contracts:
        assert not {"ignore_imports", "exhaustive_ignores"} & contract.keys(), contract["name"]
        if "containers" in contract:
            assert contract.get("exhaustive"), contract["name"]


def test_circles_are_found() -> None:
    a, b, c = (ROOT / name for name in "abc")
    assert _circles({a: {b}, b: {c}, c: {b}}) == [["b", "c"]]


@pytest.mark.parametrize("package", PRODUCT)
def test_each_folder_names_the_file_to_read_first(package: str) -> None:
    for init in sorted((ROOT / package).rglob("__init__.py")):
        if shown(init.parent) in (*GENERATED, "splitserve"):
            continue
        match = re.search(r"Read `([\w/.]+)` first", ast.get_docstring(parsed(init)) or "")
        assert match, f"{shown(init)} names no file"
        assert (init.parent / match[1]).exists(), f"{shown(init)} names {match[1]}, which is not there"
