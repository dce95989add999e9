"""What every trace format checks of a line, and how it names a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitserve.errors import InvalidArgumentError

MOST_TOKENS = 2**24


def lines_of(text: str) -> list[str]:
    """Its lines. `str.splitlines` would also break inside of a string of JSON, at U+2028 for one."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def bad_line(path: Path, line: int, what: str) -> InvalidArgumentError:
    """The error that names the line."""
    return InvalidArgumentError(f"trace: {path}, line {line}: {what}", reason="BAD_TRACE", field="trace")


def token_count(path: Path, line: int, name: str, value: Any) -> int:
    """A number of tokens, at least 1. Raises InvalidArgumentError."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        raise bad_line(path, line, f"{name} must be a whole number, not {value!r:.80}") from None
    if not 0 <= count <= MOST_TOKENS:
        raise bad_line(path, line, f"{name} must be 0..{MOST_TOKENS}, not {count}")
    # The engine has at least one prompt token and one output token.
    return max(1, count)
