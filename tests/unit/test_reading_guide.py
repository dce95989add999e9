"""What the docs name exists: files and folders everywhere, in the reading guide functions and classes as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "reading-guide.md"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = (
    *("splitserve", "coordinator", "prefill_worker", "decode_worker", "neutral_worker", "kv_transfer"),
    *("engine", "autoscaler", "bench", "dev", "tests", "docs", "protos", "compose"),
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
_FILE = re.compile(r"[\w*-]+\.(?:py|proto|hpp|cpp)")
_NAME = re.compile(r"_?[A-Za-z]\w*(?:\.(?!py\b|toml\b)\w+)?")
_LINK = re.compile(r"\]\(([\w./-]+)(?:#[^)\s]*)?\)")
_BLOCK = re.compile(r"\n(?=\s*\n|[-*|] |\d+\. )")
BUILT = ("compose/wheels",)
"""Folders that a command fills."""
WORDS = frozenset({"match", "transformers"})
"""Keywords and packages that the guide names."""


def paths_of(text: str) -> Iterator[tuple[str, str | None]]:
    """Paths in code spans, with the test that stands behind `::`."""
    for span in _SPAN.findall(text):
        path, _, test = span.partition("::")
        if _PATH.fullmatch(path) or _FILE.fullmatch(path):
            yield path, test or None


def found(path: str, page: Path) -> list[Path]:
    """The files that a path means: from the root, or a bare name anywhere in the repository."""
    if "/" in path:
        return list(ROOT.glob(path.rstrip("/"))) or list((page.parent).glob(path.rstrip("/")))
    return [file for file in files() if file.match(path)]


@cache
def files() -> list[Path]:
    return [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix]


@cache
def names_in(path: Path) -> frozenset[str]:
    """All that a module defines: functions, classes, constants, and `Class.member`."""
    names = set()

    def add(body: list[ast.stmt], inside: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=members):
                    names.add(name)
                    add(members, f"{name}.")
                case ast.FunctionDef(name=name, body=members) | ast.AsyncFunctionDef(name=name, body=members):
                    names.update({name, inside + name})
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.update({name, inside + name})
                case ast.Assign(targets=targets):
                    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
                    names.update(assigned | {inside + name for name in assigned})

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_exists(page: Path) -> None:
    wrong = []
    for path, test in paths_of(page.read_text(encoding="utf-8")):
        files = found(path, page)
        if not files and not path.startswith(BUILT):
            wrong.append(path)
        elif test and not any(test in names_in(file) for file in files):
            wrong.append(f"{path}::{test}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def blocks() -> list[str]:
    """Paragraphs, list items and rows of tables."""
    return [block for block in _BLOCK.split(GUIDE.read_text(encoding="utf-8")) if _SPAN.search(block)]


def test_every_name_of_the_guide_exists() -> None:
    """A class, a function or a setting anywhere; `Class.member` in a file that stands beside it."""
    everything = frozenset[str]().union(*(names_in(file) for file in files() if file.suffix == ".py"))
    wrong = []
    for block in blocks():
        beside = [file for path, _ in paths_of(block) if path.endswith(".py") for file in found(path, GUIDE)]
        known = frozenset[str]().union(*(names_in(file) for file in beside)) if beside else everything
        for name in {span for span in _SPAN.findall(block) if _NAME.fullmatch(span)} - WORDS:
            if name not in (known if "." in name else everything):
                wrong.append(f"{name}: {block.strip()[:80]}")
    assert not wrong


def test_the_guide_has_what_newcomers_need() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    part = {title: body for title, _, body in (part.partition("\n") for part in text.split("\n## "))}
    for kind in (
        "a transport",
        "an engine",
        "a routing rule",
        "a scaling policy",
        "an actuator",
        "an endpoint",
    ):
        assert re.search("tests? for free", part[f"Add {kind}"], re.IGNORECASE), kind
    assert len(re.findall(r"^\| `", part["Ten files, in order"], re.MULTILINE)) == 10
    assert len(re.findall(r"^\| [A-Z].*\?", part["Ten questions"], re.MULTILINE)) == 10
