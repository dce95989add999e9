"""What the docs name exists: pages and headings of links, files and folders, in the reading guide also names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "internals" / "reading-guide.md"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = tuple(
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and path.name not in ("build", "dist") and path.name[0] != "."
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
_FILE = re.compile(r"[\w*-]+\.(?:py|proto|hpp|cpp)")
_NAME = re.compile(r"_?[A-Za-z]\w*(?:\.(?!py\b|toml\b)\w+)?")
_LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"\n(?=\s*\n|[-*|] |\d+\. )")
_DOCS_IN_CODE = re.compile(r"(?<![\w/.])docs/[\w/-]+\.md")
_WORD = re.compile(r"[a-z_][a-z0-9_]*")
_EVENT = re.compile(r"[a-z_]+\.[a-z_]+")
_COMPOUND = re.compile(r"[a-z]+(?:_[a-z0-9]+)+|[A-Z]+(?:_[A-Z0-9]+)+|[a-z_]+\.(?!md|py|yaml|json)[a-z_]+")
CODE = (".py", ".proto", ".yaml", ".toml", ".hpp", ".cpp", ".sh", ".js", ".env")
FOREIGN = {
    *("otel_exporter_otlp_compression", "otel_resource_attributes", "so_reuseport", "engine_args"),
    *("dev.gpu_vllm", "bench.front_door"),
}
"""Names of others, beginnings of names, and what the roadmap announces."""
GENERATED = ("configuration.md", "api.md")
BUILT = ("compose/wheels", "build/site")
"""Folders that a command fills."""
WORDS = frozenset({"match", "transformers"})
"""Keywords and packages that the guide names."""
MAX_WORDS = 65_000
MAX_DESIGN_NOTES = 25
MAX_CHANGELOG_LINES = 60


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


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    titles = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return frozenset("#" + re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in words)


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
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for path, anchor in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            wrong.append(path + anchor)
    assert not wrong


def test_pages_that_code_names_exist() -> None:
    wrong = []
    for file in files():
        if file.suffix in (".py", ".proto", ".yaml", ".hpp", ".cpp") and file != Path(__file__).resolve():
            named = _DOCS_IN_CODE.findall(file.read_text(encoding="utf-8"))
            wrong += [f"{file.relative_to(ROOT)}: {page}" for page in named if not (ROOT / page).exists()]
    assert not wrong


def test_settings_reasons_and_events_that_pages_name_exist() -> None:
    """A name of several words, such as `drain_s`, `NO_WORKER` or `lane.slow`, stands somewhere in the code."""
    everything = "\n".join(
        file.read_text(encoding="utf-8", errors="ignore")
        for file in files()
        if file.suffix in CODE and not file.is_relative_to(ROOT / "docs")
    ).lower()
    known = {*_WORD.findall(everything), *_EVENT.findall(everything)} | FOREIGN
    wrong = []
    for page in (page for page in PAGES if page.name not in GENERATED):
        for span in set(_SPAN.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))):
            name = span.lower().removesuffix("_total")
            if _COMPOUND.fullmatch(span) and name not in known and span.lower() not in known:
                wrong.append(f"{page.name}: {span}")
    assert not wrong


def test_the_site_has_every_page() -> None:
    listed = set(
        re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert listed == {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    }


def test_the_docs_are_short() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES) <= MAX_WORDS
    assert len(list((ROOT / "docs" / "internals" / "design-notes").iterdir())) <= MAX_DESIGN_NOTES
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n") <= MAX_CHANGELOG_LINES


def test_each_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(package for extra in project["optional-dependencies"].values() for package in extra),
    ]
    page = (ROOT / "docs" / "internals" / "dependencies.md").read_text(encoding="utf-8")
    names = {re.split(r"[<>=!~;\[ ]", package)[0] for package in wanted}
    assert not sorted(name for name in names if not name.startswith("types-") and name not in page)


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
        "a metric",
    ):
        assert re.search("tests? for free", part[f"Add {kind}"], re.IGNORECASE), kind
    assert len(re.findall(r"^\| `", part["Ten files, in order"], re.MULTILINE)) == 10
    assert len(re.findall(r"^\| [A-Z].*\?", part["Ten questions"], re.MULTILINE)) == 10
