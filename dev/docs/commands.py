"""The shell commands that README.md and the pages of docs/ name: whole lines in blocks of code, and spans in text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = frozenset(
    {
        *(
            "aiperf",
            "curl",
            "docker",
            "grpcurl",
            "helm",
            "guidellm",
            "inference-perf",
            "kubectl",
            "make",
            "pip",
            "pytest",
            "python",
            "splitserve",
            "vllm",
        ),
        *("cd", "echo", "source"),
    }
)
SHELLS = ("", "bash", "sh", "console")
"""Languages of a fenced block that may hold commands."""
_FENCE = re.compile(r"^```(\w*)$")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMENT = re.compile(r"\s+#\s")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
_SETTING = re.compile(r"^[A-Z_]+=\S*$")


@dataclass(frozen=True)
class DocCommand:
    """One command. `text` is one line, without a comment; `in_block`: it is in a code block, for readers to copy."""

    page: str
    line: int
    text: str
    in_block: bool

    @property
    def words(self) -> list[str]:
        """The command without leading variable assignments."""
        words = self.text.split()
        while words and _SETTING.match(words[0]):
            words.pop(0)
        return words

    @property
    def flags(self) -> list[str]:
        """Its `--options`, without values; those behind a pipe do not count."""
        return _FLAG.findall(self.text.partition(" | ")[0])

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages(root: Path) -> list[Path]:
    """README and all pages but the design notes."""
    written = (page for page in (root / "docs").rglob("*.md") if page.parent.name != "design-notes")
    return [root / "README.md", *sorted(written)]


def commands_of(page: str, text: str) -> list[DocCommand]:
    """The commands of a page, in order."""
    commands, prose = [], []
    blocks = dict(_blocks(text.splitlines()))
    for number, line in enumerate(text.splitlines(), 1):
        prose.append("" if number in blocks else line)
    for number, line in _joined(blocks):
        if _is_command(line):
            commands.append(DocCommand(page, number, " ".join(_without_comment(line).split()), True))
    body = "\n".join(prose)
    for span in _SPAN.finditer(body):
        line = " ".join(span[1].split())
        if _is_command(line) and len(line.split()) > 1:
            commands.append(DocCommand(page, body.count("\n", 0, span.start()) + 1, line, False))
    return sorted(commands, key=lambda command: command.line)


def flags_of(text: str) -> set[str]:
    """Options named in their own code spans, such as `--model NAME`."""
    return {
        flag for span in _SPAN.finditer(text) if span[1].startswith("--") for flag in _FLAG.findall(span[1])
    }


def _is_command(line: str) -> bool:
    words = line.split()
    while words and _SETTING.match(words[0]):
        words.pop(0)
    return bool(words) and words[0] in PROGRAMS


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Numbers and lines of all blocks; those that cannot hold commands are empty."""
    language: str | None = None
    before = ""
    indented = False
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence:
            language = None if language is not None else fence[1]
            yield number, ""
        elif language is not None:
            yield number, line if language in SHELLS else ""
        else:
            indented = line.startswith("    ") and (indented or not before.strip())
            if indented:
                yield number, line[4:]
        before = line


def _joined(blocks: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Joins continued lines (a backslash, or an open quote)."""
    begun, held = 0, ""
    for number, line in blocks.items():
        begun, held = (begun, f"{held} {line.strip()}") if held else (number, line.strip())
        if held.endswith("\\"):
            held = held.removesuffix("\\").rstrip()
        elif not _is_command(held) or _is_whole(held):
            yield begun, held
            begun, held = 0, ""
    if held:
        yield begun, held


def _without_comment(line: str) -> str:
    for sign in _COMMENT.finditer(line):
        if _is_whole(line[: sign.start()]):
            return line[: sign.start()]
    return line


def _is_whole(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True
