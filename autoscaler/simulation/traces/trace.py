"""Traces and their file formats: Azure CSV, Mooncake JSONL, the recordings of `splitserve record`, and any log through
a column map."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path

from autoscaler.simulation.traces.columns import ColumnMap
from autoscaler.simulation.traces.line_checks import bad_line, lines_of, token_count
from splitserve.errors import InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` name the prompt's 512-token blocks: equal beginnings have equal ids."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


BLOCK_TOKENS = 512
"""Tokens of one of `block_ids`; the unit of Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A named sequence of requests. Arrivals are not negative and never decrease."""

    name: str
    requests: Sequence[TraceRequest]

    @property
    def duration_s(self) -> float:
        """Until the last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0


AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
NOT_REQUESTS = frozenset({"recording", "workers"})
"""Keys of a recording's lines that are no requests: its head and its end."""
csv.field_size_limit(2**24)
"""Logs have prompts beside the numbers."""
MOST_BYTES = 2**29
"""Of a file. It is read as a whole."""
MOST_REQUESTS = 2_000_000
"""Of a trace. The simulator keeps each of them, about a kilobyte, until the end of the run."""
_MOST_MS = 1e15
"""Times since the epoch are less."""
_MICROSECOND_DIGITS = 26
"""Length of a timestamp with six digits of fraction, as far as datetime reads."""


def load_trace(path: Path, seed: int = 0, columns: ColumnMap | None = None) -> Trace:
    """The trace in a file; its first character tells the format. With `columns` it is any log that has these.

    `seed` decides how arrivals are spread inside the ticks of a Mooncake trace; a recording has exact times.
    Raises what `read_trace` and `trace_of` do.
    """
    return trace_of(path, read_trace(path), seed, columns)


def read_trace(path: Path, setting: str = "trace") -> str:
    """The text of a file that may be a trace. Raises ConfigError naming the setting, also for more than
    `MOST_BYTES`."""
    return read_named_text(path, setting, MOST_BYTES, pipes="patient", encoding="utf-8-sig")


def trace_of(path: Path, text: str, seed: int = 0, columns: ColumnMap | None = None) -> Trace:
    """The trace of a text; see `load_trace`. Raises InvalidArgumentError (BAD_TRACE) with the number of the first bad
    line, and (TRACE_TOO_LONG) for more than `MOST_REQUESTS`."""
    mooncake = columns is None and text.lstrip().startswith("{")
    recorded = mooncake and is_recording(text)
    try:
        if columns is not None:
            rows = _mapped(path, text, columns)
        else:
            rows = _mooncake(path, text) if mooncake else _azure(path, text)
        found = list(islice(rows, MOST_REQUESTS + 1))
    except csv.Error as error:
        raise bad_line(path, 1, f"not CSV, from here or from a later line on: {error}") from None
    if not found:
        raise bad_line(path, 1, "no requests")
    if len(found) > MOST_REQUESTS:
        what = f"trace: {path} has more than {MOST_REQUESTS} requests; cut it, or replay it in parts"
        raise InvalidArgumentError(what, reason="TRACE_TOO_LONG", field="trace")
    found.sort(key=lambda request: request.arrival_s)
    if mooncake and not recorded:
        found = _spread(found, seed)
    first_s = found[0].arrival_s
    return Trace(path.stem, [_shifted(request, -first_s) for request in found])


def is_recording(text: str) -> bool:
    """Whether a JSONL file is one of `splitserve record`: its first line says so."""
    head, _, _ = text.lstrip().partition("\n")
    try:
        data = json.loads(head)
    except (RecursionError, ValueError):
        return False
    return isinstance(data, dict) and "recording" in data


def _azure(path: Path, text: str) -> Iterator[TraceRequest]:
    rows = csv.reader(lines_of(text))
    if (header := next(rows, None)) != AZURE_HEADER:
        raise bad_line(
            path, 1, f"expected the columns {','.join(AZURE_HEADER)}, found {','.join(header or [])!r:.80}"
        )
    for line, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != len(AZURE_HEADER):
            raise bad_line(path, line, f"expected {len(AZURE_HEADER)} columns, found {len(row)}")
        try:
            arrival_s = datetime.fromisoformat(row[0].strip()[:_MICROSECOND_DIGITS]).timestamp()
        except ValueError:
            raise bad_line(path, line, f"TIMESTAMP is not a time: {row[0]!r:.80}") from None
        prompt = token_count(path, line, AZURE_HEADER[1], row[1])
        yield TraceRequest(arrival_s, prompt, token_count(path, line, AZURE_HEADER[2], row[2]))


def _mapped(path: Path, text: str, columns: ColumnMap) -> Iterator[TraceRequest]:
    for one in columns.lines(path, text):
        prompt = token_count(path, one.line, columns.input_length, one.input_length)
        output = token_count(path, one.line, columns.output_length, one.output_length)
        yield TraceRequest(one.timestamp_s, prompt, output)


def _mooncake(path: Path, text: str) -> Iterator[TraceRequest]:
    for line, row in enumerate(lines_of(text), 1):
        if not row.strip():
            continue
        try:
            data = json.loads(row)
        except (RecursionError, ValueError):
            raise bad_line(path, line, "not a JSON object") from None
        if not isinstance(data, dict):
            raise bad_line(path, line, "not a JSON object")
        if not data.keys().isdisjoint(NOT_REQUESTS):
            continue
        timestamp = data.get("timestamp")
        if (
            isinstance(timestamp, bool)
            or not isinstance(timestamp, int | float)
            or not 0 <= timestamp <= _MOST_MS
        ):
            raise bad_line(path, line, f"timestamp must be a number of milliseconds, not {timestamp!r:.80}")
        blocks = data.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise bad_line(path, line, "hash_ids must be a list of integers")
        prompt = token_count(path, line, "input_length", data.get("input_length"))
        output = token_count(path, line, "output_length", data.get("output_length"))
        yield TraceRequest(timestamp / 1e3, prompt, output, tuple(blocks))


def _spread(found: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spreads the requests of each tick over the time until the next one; the last tick is as long as the mean.

    Otherwise every tick, about 3 s, would be a burst that the real service never had.
    """
    ticks = [list(tick) for _, tick in groupby(found, key=lambda request: request.arrival_s)]
    starts = [tick[0].arrival_s for tick in ticks]
    mean_s = (starts[-1] - starts[0]) / max(1, len(starts) - 1)
    chance = random.Random(seed)
    spread = []
    for tick, end_s in zip(ticks, [*starts[1:], starts[-1] + mean_s], strict=True):
        length_s = end_s - tick[0].arrival_s
        offsets = sorted(chance.uniform(0, length_s) for _ in tick)
        spread += [_shifted(request, offset) for request, offset in zip(tick, offsets, strict=True)]
    return spread


def _shifted(request: TraceRequest, by_s: float) -> TraceRequest:
    return TraceRequest(
        request.arrival_s + by_s, request.prompt_tokens, request.output_tokens, request.block_ids
    )
