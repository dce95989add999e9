"""The checks of a line that all trace formats share, and the column map, which reads any log of requests as a trace:
CSV with a header, or one JSON object a line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitserve.errors import InvalidArgumentError

MOST_TOKENS = 2**24


def lines_of(text: str) -> list[str]:
    """The lines of a text. `str.splitlines` would also break inside of JSON strings, for example at U+2028."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def bad_line(path: Path, line: int, what: str) -> InvalidArgumentError:
    """The error that names the line."""
    return InvalidArgumentError(f"trace: {path}, line {line}: {what}", reason="BAD_TRACE", field="trace")


def json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The requests of a JSONL file with the numbers of their lines. Raises InvalidArgumentError for other lines."""
    for line, row in enumerate(lines_of(text), 1):
        if not row.strip():
            continue
        try:
            data = json.loads(row)
        except (RecursionError, ValueError):
            raise bad_line(path, line, "not a JSON object") from None
        if not isinstance(data, dict):
            raise bad_line(path, line, "not a JSON object")
        yield line, data


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


NEEDED = ("timestamp", "input_length", "output_length")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The columns of a log to read. In JSON a name may have dots: `usage.prompt_tokens` is a field of `usage`."""

    timestamp: str
    input_length: str
    output_length: str
    unit_s: float = 1.0
    """Unit of timestamps that are numbers, in seconds. Other timestamps are ISO 8601."""

    @classmethod
    def parse(cls, text: str) -> ColumnMap:
        """From `timestamp=NAME,input_length=NAME,output_length=NAME[,unit=ms]`. Raises InvalidArgumentError."""
        columns: dict[str, str] = {}
        for part in text.split(","):
            key, equals, name = (word.strip() for word in part.partition("="))
            if not equals or not name:
                raise _wrong(f"expected KEY=COLUMN, not {part!r}")
            if key not in (*NEEDED, "unit"):
                raise _wrong(f"no such key: {key!r} ({', '.join(NEEDED)}, unit)")
            if key in columns:
                raise _wrong(f"{key} is given twice")
            columns[key] = name
        if missing := [key for key in NEEDED if key not in columns]:
            raise _wrong(f"missing: {', '.join(missing)}")
        unit = columns.pop("unit", "s")
        if unit not in UNITS:
            raise _wrong(f"unit must be {', '.join(UNITS)}, not {unit!r}")
        return cls(**columns, unit_s=UNITS[unit])

    def lines(self, path: Path, text: str) -> Iterator[tuple[int, float, Any, Any]]:
        """The requests: line, time in seconds, and the two lengths as the log has them. Raises InvalidArgumentError
        naming the first bad line."""
        rows = self._json(path, text) if text.lstrip().startswith("{") else self._csv(path, text)
        for line, (when, prompt, output) in rows:
            yield line, self._seconds(path, line, when), prompt, output

    def _csv(self, path: Path, text: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
        lines = lines_of(text)
        delimiter = max(_DELIMITERS, key=lines[0].count)
        rows = csv.reader(lines, delimiter=delimiter)
        header = [name.strip() for name in next(rows, [])]
        places = []
        for name in (self.timestamp, self.input_length, self.output_length):
            if name not in header:
                raise bad_line(path, 1, f"no column {name!r}, only {', '.join(header) or 'none'}")
            places.append(header.index(name))
        for row in rows:
            if not row:
                continue
            if len(row) <= max(places):
                raise bad_line(path, rows.line_num, f"expected {len(header)} columns, found {len(row)}")
            yield rows.line_num, tuple(row[place].strip() for place in places)

    def _json(self, path: Path, text: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
        names = (self.timestamp, self.input_length, self.output_length)
        for line, data in json_lines(path, text):
            yield line, tuple(_field(path, line, data, name) for name in names)

    def _seconds(self, path: Path, line: int, value: Any) -> float:
        try:
            if isinstance(value, bool):
                raise TypeError
            seconds = float(value) * self.unit_s
            if math.isfinite(seconds):
                return seconds
        except (TypeError, ValueError, OverflowError):
            pass
        try:
            moment = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            message = f"{self.timestamp} must be a number or a time as in ISO 8601, not {value!r:.80}"
            raise bad_line(path, line, message) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _field(path: Path, line: int, data: Any, name: str) -> Any:
    if isinstance(data, Mapping) and name in data:
        return data[name]
    value = data
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise bad_line(path, line, f"no field {name!r}")
        value = value[part]
    return value


def _wrong(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"columns: {what}", field="columns")
