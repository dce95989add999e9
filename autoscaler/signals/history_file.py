"""What forecasts are made from, in a small file, so that a restart does not forget it: arrivals, cold starts, seasons.

Forecast errors are not in it: the policy measures them on the arrivals, at each decision. Times in the file are seconds
since the epoch, because no other clock outlives a process.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoscaler.snapshot import PoolName
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.runtime.bounded_file import read_small_file

VERSION: Final = 1
MAX_BYTES = 16 * 2**20
MAX_BUCKETS = 100_000
MAX_COLD_STARTS = 5
MAX_RATES = 20_000
"""Intervals of a season's record: 13 days of minutes."""
SAVE_S = 5.0
"""Between two writes, seconds: what a process that is killed loses at most."""
LAST_WAIT_S = 1.0
"""How long a write waits for one under way, which cannot be cancelled."""
LAST_SAVE_S = 5.0
"""How long the end waits for the last write: a disk that does not answer does not hold up who takes over."""
CLOCK_ERROR_S = 60.0
"""A file that is further in the future was written by another clock."""

Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Row = tuple[Amount, Amount, Amount, Amount, Amount, Amount]
"""A bucket: start and end, requests, prompt tokens, uncached tokens, output tokens."""


class SeasonRecord(BaseModel):
    """What a seasonal forecast of one pool is made from; see `autoscaler.policies.predictive.PredictiveMemory`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    season_s: Amount
    interval_s: Amount
    """Another season or interval than the policy's: it is of no use."""
    seen_until_wall_s: Amount
    interval: Annotated[int, Field(ge=0, le=10**12)]
    amount: Amount
    covered_s: Amount
    rates: Annotated[tuple[Amount, ...], Field(max_length=MAX_RATES)]


class ForecastHistory(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VERSION
    model: Annotated[str, Field(max_length=512)] = ""
    """Whose traffic it is; empty: that of all models."""
    saved_wall_s: Amount
    arrivals: Annotated[tuple[Row, ...], Field(max_length=MAX_BUCKETS)] = ()
    """In order of time, none over another."""
    cold_starts_s: dict[PoolName, Annotated[tuple[Amount, ...], Field(max_length=MAX_COLD_STARTS)]] = Field(
        default_factory=dict
    )
    """The latest of each pool, the newest last."""
    seasons: dict[PoolName, SeasonRecord] = Field(default_factory=dict)
    """Of pools of kind `predictive`."""


class Remembering(Protocol):
    """What has a history: an `Observer`, alone or with what the policy has learned."""

    def history(self) -> ForecastHistory:
        """What is known now."""

    def remember(self, history: ForecastHistory) -> None:
        """Goes on from what was known, before the first look."""


class HistoryFile:
    """Reads the file once, at the start, and then replaces it each `save_s` seconds."""

    def __init__(
        self, path: Path, save_s: float = SAVE_S, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._save_s, self._wall_clock = path, save_s, wall_clock
        self._observer: Remembering | None = None
        self._problem = ""
        self._written: tuple[int, int] | None = None
        """Inode and time of what was written last."""
        self._is_shared = False
        self._writing = threading.Lock()

    def restore(self, observer: Remembering, history_s: float) -> None:
        """Gives the file's content to the observer, whose history is written from now on; arrivals count for
        `history_s` seconds. What cannot be used is left out with one line in the log.

        Raises ConfigError (`history_file`) for what would be lost if it were replaced: a device or a pipe, such as
        /dev/null, a text that does not begin as JSON does, such as a policy, and a JSON object without a version."""
        self._observer = observer
        try:
            history = self._read(observer.history().model, history_s)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log_event("history.ignored", file=str(self._path), error=_said(error))
            return
        observer.remember(history)
        log_event(
            "history.restored",
            file=str(self._path),
            buckets=len(history.arrivals),
            age_s=round(self._wall_clock() - history.saved_wall_s, 3),
            season_intervals={pool: len(season.rates) for pool, season in history.seasons.items()},
        )

    async def run(self) -> None:
        """Writes until cancelled, and once more then. Call after `restore`."""
        assert self._observer is not None
        try:
            while True:
                await asyncio.sleep(self._save_s)
                # On a thread: a disk that does not answer holds nothing else up.
                await asyncio.to_thread(self.save, self._observer.history())
        finally:
            last = asyncio.create_task(asyncio.to_thread(self.save, self._observer.history()))
            await asyncio.wait([last], timeout=LAST_SAVE_S)

    def save(self, history: ForecastHistory) -> None:
        """Replaces the file, unless it is being written. What goes wrong is logged once, until it goes well again."""
        if not self._writing.acquire(timeout=LAST_WAIT_S):
            return
        try:
            self._replace(history)
        finally:
            self._writing.release()

    def _replace(self, history: ForecastHistory) -> None:
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._tell_of_another_writer()
            beside.write_text(history.model_dump_json(), encoding="utf-8")
            beside.replace(self._path)
            self._written = _stamp_of(self._path)
        except OSError as error:
            with suppress(OSError):  # a disk that can only be read refuses that, too
                beside.unlink()
            if str(error) != self._problem:
                log_event("history.not_saved", file=str(self._path), error=str(error))
            self._problem = str(error)
            return
        self._problem = ""

    def _tell_of_another_writer(self) -> None:
        found = _stamp_of(self._path)
        if self._is_shared or found in (None, self._written) or self._written is None:
            return
        self._is_shared = True
        why = "another process writes it, too, and each loses what the other has seen"
        log_event("history.shared", level=logging.WARNING, file=str(self._path), error=why)

    def _another(self, why: str) -> ConfigError:
        return ConfigError(f"history_file: {self._path}: {why}", field="history_file")

    def _read(self, model: str, history_s: float) -> ForecastHistory:
        """The content. Raises OSError, ConfigError, and ValueError for one that is no history of this traffic and
        time."""
        kind = self._path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise self._another("it is no regular file")
        try:
            content = read_small_file(self._path, MAX_BYTES)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise ValueError(f"longer than {MAX_BYTES} bytes") from None
        if _is_other_text(content):
            raise self._another("it holds another text, which would be replaced")
        try:
            history = ForecastHistory.model_validate_json(content)
        except ValidationError:
            if _is_other_object(content):
                raise self._another("it holds another JSON object, which would be replaced") from None
            raise
        age_s = self._wall_clock() - history.saved_wall_s
        if history.model != model:
            raise ValueError(f"model: {history.model!r} in the file, {model!r} here")
        if age_s < -CLOCK_ERROR_S:
            raise ValueError(f"saved_wall_s: {-age_s:.0f} s in the future")
        if age_s > history_s and not history.seasons:
            raise ValueError(f"saved_wall_s: {age_s:.0f} s old, forecasts look back {history_s:.0f} s")
        latest_s = history.saved_wall_s + CLOCK_ERROR_S
        for pool, season in history.seasons.items():
            if max(season.seen_until_wall_s, season.interval * season.interval_s) > latest_s:
                raise ValueError(f"seasons.{pool}: after saved_wall_s")
        ends = 0.0
        for number, (start, end, *_) in enumerate(history.arrivals):
            if start < ends or end <= start or end > latest_s:
                raise ValueError(f"arrivals.{number}: not in order of time, or after saved_wall_s")
            ends = end
        if age_s > history_s:
            return history.model_copy(update={"arrivals": (), "cold_starts_s": {}})
        return history


def _is_other_text(content: bytes) -> bool:
    text = content.lstrip()[:4096].decode("utf-8", errors="replace")
    return bool(text) and text[0] not in "{[" and "\0" not in text


def _is_other_object(content: bytes) -> bool:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "version" not in found


def _said(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
    return str(error)


def _stamp_of(path: Path) -> tuple[int, int] | None:
    """None for one that is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
