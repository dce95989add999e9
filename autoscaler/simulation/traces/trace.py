"""Traces and their file formats: the coordinator's request log, Azure CSV, Mooncake JSONL, and any log through a column
map."""

from __future__ import annotations

import csv
import gzip
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from autoscaler.simulation.traces.columns import ColumnMap, bad_line, json_lines, token_count
from splitserve.errors import ConfigError, InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_file


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` name the prompt's 512-token blocks: prompts that begin alike have the same first ids."""

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
        """Seconds until the last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0


AZURE = ColumnMap("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of Azure's traces."""
LOG_FIELDS = frozenset({"time", "prefix_hashes", "outcome"})
"""Fields of a request log's line that no other format has."""
csv.field_size_limit(2**24)
"""Logs may have whole prompts beside the numbers."""
MOST_BYTES = 2**29
"""Largest file: it is read as a whole."""
MOST_REQUESTS = 2_000_000
"""Most requests of a trace, copies included: the simulator keeps each, about a kilobyte, until the end of the run."""
LONGEST_DAYS = 31
"""Longest trace. A longer one probably has times in another unit."""
GZIP = b"\x1f\x8b"
"""Beginning of a compressed file."""
_MOST_MS = 1e15
"""Larger than any time since the epoch."""
_HASH_MASK = 2**48 - 1


def load_trace(path: Path, seed: int = 0, columns: ColumnMap | None = None) -> Trace:
    """The trace in a file. Its first line shows the format; with `columns` it is any log that has these columns.

    `seed` decides how arrivals are spread inside the ticks of a Mooncake trace; a request log has exact times.
    Raises ConfigError for a file that cannot be read or has more than `MOST_BYTES`, InvalidArgumentError (BAD_TRACE)
    with the number of the first bad line, and (TRACE_TOO_LONG) for more than `MOST_REQUESTS` or `LONGEST_DAYS`.
    """
    text, in_ticks = _text(path), False
    try:
        if columns is not None or not text.lstrip().startswith("{"):
            rows = _mapped(path, text, columns or AZURE)
        elif _is_request_log(text):
            rows = _request_log(path, text)
        else:
            rows, in_ticks = _mooncake(path, text), True
        requests = list(islice(rows, MOST_REQUESTS + 1))
    except csv.Error as error:
        raise bad_line(path, 1, f"not CSV, from here or from a later line on: {error}") from None
    if not requests:
        raise bad_line(path, 1, "no requests")
    if len(requests) > MOST_REQUESTS:
        what = f"trace: {path} has more than {MOST_REQUESTS} requests; cut it, or replay it in parts"
        raise InvalidArgumentError(what, reason="TRACE_TOO_LONG", field="trace")
    requests.sort(key=lambda request: request.arrival_s)
    if in_ticks:
        requests = _spread(requests, seed)
    first_s = requests[0].arrival_s
    if (days := (requests[-1].arrival_s - first_s) / 86_400) > LONGEST_DAYS:
        what = f"it lasts for {days:.3g} days, at most {LONGEST_DAYS} can be replayed"
        message = f"trace: {what}: cut it, or look at the unit of its times"
        raise InvalidArgumentError(message, reason="TRACE_TOO_LONG", field="trace")
    return Trace(path.stem, [_shifted(request, -first_s) for request in requests])


def _text(path: Path) -> str:
    """The text of a file that may be compressed by gzip."""
    content = read_named_file(path, "trace", MOST_BYTES)
    if content.startswith(GZIP):
        try:
            with gzip.open(BytesIO(content)) as packed:
                content = packed.read(MOST_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ConfigError(f"trace: {path} is damaged: {error}", field="trace") from None
        if len(content) > MOST_BYTES:
            what = f"cannot read {path}: unpacked, it has more than {MOST_BYTES} bytes"
            raise ConfigError(f"trace: {what}", field="trace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"trace: {path} is no UTF-8 text, at byte {error.start}"
        raise ConfigError(message, field="trace") from None


def _is_request_log(text: str) -> bool:
    """Whether a JSONL file is a request log, by its first line."""
    head, _, _ = text.lstrip().partition("\n")
    try:
        data = json.loads(head)
    except (RecursionError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= LOG_FIELDS


def _request_log(path: Path, text: str) -> Iterator[TraceRequest]:
    """The requests of a request log. One that did not complete counts with the output that it had."""
    for line, data in json_lines(path, text):
        at_s, hashes = _time(path, line, data, "time", "seconds"), data.get("prefix_hashes")
        try:
            # 48 bits: the hashes of a scaled trace's copies stay below 2^64.
            blocks = tuple(int(name, 16) & _HASH_MASK for name in hashes or ())
        except (TypeError, ValueError):
            raise bad_line(path, line, "prefix_hashes must be a list of hexadecimal numbers") from None
        prompt = token_count(path, line, "prompt_tokens", data.get("prompt_tokens"))
        output = token_count(path, line, "output_tokens", data.get("output_tokens"))
        yield TraceRequest(at_s, prompt, output, blocks)


def _mapped(path: Path, text: str, columns: ColumnMap) -> Iterator[TraceRequest]:
    for line, timestamp_s, input_length, output_length in columns.lines(path, text):
        prompt = token_count(path, line, columns.input_length, input_length)
        output = token_count(path, line, columns.output_length, output_length)
        yield TraceRequest(timestamp_s, prompt, output)


def _mooncake(path: Path, text: str) -> Iterator[TraceRequest]:
    for line, data in json_lines(path, text):
        at_ms = _time(path, line, data, "timestamp", "milliseconds")
        blocks = data.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise bad_line(path, line, "hash_ids must be a list of integers")
        prompt = token_count(path, line, "input_length", data.get("input_length"))
        output = token_count(path, line, "output_length", data.get("output_length"))
        yield TraceRequest(at_ms / 1e3, prompt, output, tuple(blocks))


def _time(path: Path, line: int, data: Mapping[str, Any], name: str, unit: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_MS:
        raise bad_line(path, line, f"{name} must be a number of {unit}, not {value!r:.80}")
    return value


def _spread(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spreads the requests of each tick, about 3 s, over the time until the next one. The last tick has the mean
    length.

    Otherwise every tick would be a burst that the real service never had.
    """
    ticks = [list(tick) for _, tick in groupby(requests, key=lambda request: request.arrival_s)]
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
    return replace(request, arrival_s=request.arrival_s + by_s)
