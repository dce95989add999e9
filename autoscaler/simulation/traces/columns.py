"""A column map: any log of requests as a trace. CSV with a header, or one JSON object a line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoscaler.simulation.traces.line_checks import bad_line, lines_of
from splitserve.errors import InvalidArgumentError

NEEDED = ("timestamp", "input_length", "output_length")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One request of a log. Lengths as they are written there."""

    line: int
    timestamp_s: float
    input_length: Any
    output_length: Any


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Which column of a log has what. In JSON a name may have dots: `usage.prompt_tokens` is a field of `usage`."""

    timestamp: str
    input_length: str
    output_length: str
    unit_s: float = 1.0
    """Of timestamps that are numbers, seconds. Others are times as in ISO 8601."""

    @classmethod
    def parse(cls, text: str) -> ColumnMap:
        """From `timestamp=NAME,input_length=NAME,output_length=NAME[,unit=ms]`. Raises InvalidArgumentError."""
        found: dict[str, str] = {}
        for part in text.split(","):
            key, equals, name = (word.strip() for word in part.partition("="))
            if not equals or not name:
                raise _wrong(f"expected KEY=COLUMN, not {part!r}")
            if key not in (*NEEDED, "unit"):
                raise _wrong(f"no such key: {key!r} ({', '.join(NEEDED)}, unit)")
            if key in found:
                raise _wrong(f"{key} is given twice")
            found[key] = name
        if missing := [key for key in NEEDED if key not in found]:
            raise _wrong(f"missing: {', '.join(missing)}")
        unit = found.pop("unit", "s")
        if unit not in UNITS:
            raise _wrong(f"unit must be {', '.join(UNITS)}, not {unit!r}")
        return cls(**found, unit_s=UNITS[unit])

    def lines(self, path: Path, text: str) -> Iterator[LogLine]:
        """The requests, as they stand in the file. Raises InvalidArgumentError naming the first bad line."""
        rows = self._json(path, text) if text.lstrip().startswith("{") else self._csv(path, text)
        for line, (when, prompt, output) in rows:
            yield LogLine(line, self._seconds(path, line, when), prompt, output)

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
        for line, row in enumerate(lines_of(text), 1):
            if not row.strip():
                continue
            try:
                data = json.loads(row)
            except (RecursionError, ValueError):
                raise bad_line(path, line, "not a JSON object") from None
            names = (self.timestamp, self.input_length, self.output_length)
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
    found = data
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise bad_line(path, line, f"no field {name!r}")
        found = found[part]
    return found


def _wrong(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"columns: {what}", field="columns")
