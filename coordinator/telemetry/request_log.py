"""The request log: one JSON line for each request that has ended, without its content.

`splitserve simulate` and `splitserve plan` read it. A thread writes the lines, so that a slow disk never delays a
request: when the thread's queue or the disk is full, lines are dropped and counted.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from time import monotonic
from typing import Any

from prometheus_client import Metric

from coordinator.request.state import RequestState
from coordinator.telemetry.request_record import RequestRecord, phases_of
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.metrics import counter

PREFIX_BLOCK_TOKENS = 512
"""Tokens between two hashes of a line, as in the traces that the simulator reads."""
MAX_PREFIX_HASHES = 256
MAX_QUEUED = 4096
"""Most lines that wait for the disk."""
_BATCH = 256
_RETRY_S = 1.0
"""Pause after a failed write; lines are dropped meanwhile."""
_CLOSE_S = 2.0
"""How long the end of the coordinator waits for lines that are still queued."""


class RequestLog:
    """Appends a line for each request at its end.

    A file that would grow beyond `max_bytes` is renamed to FILE.1, which replaces the earlier FILE.1.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError if the file cannot be appended to."""
        self._path, self._max_bytes = path, max_bytes
        self._refused = self._overflowed = 0
        self._queue: Queue[dict[str, Any] | None] = Queue(MAX_QUEUED)
        self._paused_until_s = 0.0
        try:
            self._file: int | None = _opened(path)
        except OSError as error:
            message = f"request_log: cannot write {path}: {error.strerror or error}"
            raise ConfigError(message, field="request_log") from None
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, state: RequestState) -> None:
        """Queues the line of a request that has ended."""
        line = line_of(record, state.request.block_keys, state.request.max_tokens)
        try:
            self._queue.put_nowait(line)
        except Full:
            self._overflowed += 1

    def metrics(self) -> list[Metric]:
        """The number of dropped lines."""
        return [
            counter(
                "splitserve_request_log_dropped_lines_total",
                "Lines that the request log lacks because its disk was full or slow",
                self._refused + self._overflowed,
            ),
        ]

    def close(self) -> None:
        """Writes the queued lines, for at most two seconds. Blocks, so do not call it on the event loop."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except Full:
            return
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            lines, is_last = self._taken()
            if lines:
                self._write(lines)
            if is_last:
                break
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _taken(self) -> tuple[list[dict[str, Any]], bool]:
        """Waits for lines and takes up to `_BATCH` of them. Returns them, and whether they are the last ones."""
        line = self._queue.get()
        taken: list[dict[str, Any]] = []
        while line is not None:
            taken.append(line)
            if len(taken) >= _BATCH:
                return taken, False
            try:
                line = self._queue.get_nowait()
            except Empty:
                return taken, False
        return taken, True

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if monotonic() < self._paused_until_s:
            self._refused += len(lines)
            return
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            self._append(text)
        except OSError as error:
            self._refused += len(lines)
            self._paused_until_s = monotonic() + _RETRY_S
            log_event("request_log.failed", path=str(self._path), error=error.strerror or str(error))

    def _append(self, text: bytes) -> None:
        """Appends all of `text` or nothing. Raises OSError."""
        if self._file is None:
            self._file = _opened(self._path)
        size = os.fstat(self._file).st_size
        if size and size + len(text) > self._max_bytes:
            os.close(self._file)
            self._file = None
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file, size = _opened(self._path), 0
        try:
            if os.write(self._file, text) < len(text):
                raise OSError("the disk is full")
        except OSError:
            os.ftruncate(self._file, size)
            raise


def line_of(record: RequestRecord, keys: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """The line of a request that has ended. Times in seconds, `time` since the epoch."""
    phases: dict[str, float] = {}
    for phase in phases_of(record):
        phases[phase.name] = phases.get(phase.name, 0.0) + (phase.end_ms - phase.start_ms) / 1e3
    attempt = record.first_attempt or (record.attempts[-1] if record.attempts else None)
    cached = min(attempt.report.cached_prompt_tokens, record.prompt_tokens) if attempt is not None else 0
    return {
        "time": round(record.received_unix_s, 6),
        "request_id": record.request_id,
        "model": record.served_model,
        "tenant": record.tenant or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": cached,
        "uncached_tokens": record.prompt_tokens - cached,
        "max_output_tokens": max_tokens,
        "output_tokens": record.output_tokens,
        "prefix_hashes": prefix_hashes(keys, record.block_size_tokens),
        "prefill_worker": attempt.prefill_worker if attempt is not None else None,
        "decode_worker": attempt.decode_worker or None if attempt is not None else None,
        "prefill_at": None if attempt is None else "decode" if attempt.is_local else "prefill",
        "attempts": record.attempt_count,
        "phases_s": {name: round(seconds, 6) for name, seconds in phases.items()},
        "ttft_s": None if record.first_token_ms is None else round(record.first_token_ms / 1e3, 6),
        "tpot_s": round(record.tpot_ms / 1e3, 6) if record.tpot_ms else None,
        "duration_s": round(record.ended_ms / 1e3, 6),
        "outcome": record.outcome,
    }


def prefix_hashes(keys: Sequence[int], block_size: int) -> list[str]:
    """Hashes of the prompt's prefixes of 512, 1024, ... tokens, 16 hex digits each, at most `MAX_PREFIX_HASHES`.

    They are the prefix index's keys: chained from block to block, and salted by tenant. Empty unless 512 is a multiple
    of `block_size`.
    """
    if not keys or PREFIX_BLOCK_TOKENS % block_size:
        return []
    step = PREFIX_BLOCK_TOKENS // block_size
    return [f"{key:016x}" for key in keys[step - 1 :: step][:MAX_PREFIX_HASHES]]


def _opened(path: Path) -> int:
    """The file descriptor. Raises OSError, also if `path` is no regular file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor
