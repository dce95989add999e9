"""Spot notices: word that a worker's machine is taken away. A notice comes by SIGUSR1, or by a file that an agent of
the machine writes. Nothing that fails here ends the worker."""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from splitserve.errors import InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.runtime.process import calling_on_signal

POLL_S = 0.5
"""Time between two looks for the file."""
REREAD_S = 0.1
"""A writer makes the file first, and then writes the time."""
SOONER_S = 0.5
"""A later notice counts if the machine ends at least this much sooner by it; otherwise it repeats the first one."""
MAX_LEFT_S = 86_400.0
"""A notice of more than a day counts as one of a day."""
MAX_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """The machine is taken away. A notice is final; a later one only counts if the machine ends sooner by it."""

    source: str
    """"signal" or "file"."""
    ends_s: float
    """When the machine is taken away, on `time.monotonic`."""


class NoticeFile:
    """A file that is a notice once it exists. The file holds the time when the machine is taken away, as in RFC 3339,
    or is empty, which means `notice_s` after it is seen.

    A file on a disk that was kept outlives its machine, and would end each new machine at once. So a file is no notice
    if that time, for an empty file `notice_s` after it was written, had passed before this object was made.
    """

    def __init__(self, path: Path, notice_s: float, wall_clock: Callable[[], float] = time.time) -> None:
        self._path, self._notice_s, self._wall_clock = path, notice_s, wall_clock
        self._since_wall_s = wall_clock()
        self._outlived: float | None = None

    async def time_left_s(self) -> float | None:
        """Seconds until the machine is taken away, at least 0; None: no notice.

        Raises UnavailableError (FILE_UNREADABLE), and InvalidArgumentError (NO_TIME) for text that is no time.
        """
        content = await asyncio.to_thread(self._read)
        if content is not None and not content[0]:
            await asyncio.sleep(REREAD_S)
            content = await asyncio.to_thread(self._read) or content
        if content is None:
            return None
        text, written_wall_s = content
        ends_wall_s = _wall_time_s(text) if text else written_wall_s + self._notice_s
        if ends_wall_s < self._since_wall_s:
            self._ignore(written_wall_s, ends_wall_s)
            return None
        return min(max(0.0, ends_wall_s - self._wall_clock()), MAX_LEFT_S) if text else self._notice_s

    def _ignore(self, written_wall_s: float, ends_wall_s: float) -> None:
        if self._outlived != written_wall_s:
            self._outlived = written_wall_s
            ended_s = round(self._wall_clock() - ends_wall_s, 1)
            log_event("notice.outlived", level=logging.WARNING, file=str(self._path), ended_s_ago=ended_s)

    def _read(self) -> tuple[str, float] | None:
        """The content, and when it was written in seconds since the epoch; None while the file does not exist."""
        try:
            status = self._path.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe may never end
                raise UnavailableError(f"{self._path}: no regular file", reason="FILE_UNREADABLE")
            with self._path.open("rb") as file:
                return file.read(MAX_CHARACTERS).decode(errors="replace").strip(), status.st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self._path}: {error.strerror}"
            raise UnavailableError(message, reason="FILE_UNREADABLE") from None


async def follow_notices(
    file: NoticeFile | None,
    notice_s: float,
    take: Callable[[SpotNotice], None],
    known: SpotNotice | None = None,
) -> None:
    """Gives `take` the first notice, and each later one by which the machine ends sooner; `known`: a notice that was
    taken before. Runs until cancelled. `notice_s`: the time from a signal until the machine is taken away."""

    def on_notice(source: str, left_s: float) -> None:
        nonlocal known
        notice = SpotNotice(source, time.monotonic() + left_s)
        if known is None or notice.ends_s < known.ends_s - SOONER_S:
            known = notice
            take(notice)

    # Ignored afterwards: by default the signal would end the worker, and a notice may be given twice.
    with calling_on_signal(signal.SIGUSR1, lambda: on_notice("signal", notice_s), ignore_after=True):
        if file is not None:
            await _poll(file, lambda left_s: on_notice("file", left_s))
        await asyncio.Event().wait()


async def _poll(file: NoticeFile, on_notice: Callable[[float], None]) -> None:
    """Looks for the file every POLL_S. A failure is logged once, and again when its reason changes."""
    logged = ""
    while True:
        reason = ""
        try:
            if (left_s := await file.time_left_s()) is not None:
                on_notice(left_s)
        except SplitserveError as error:
            reason = error.reason
            if reason != logged:
                log_event("notice.unknown", level=logging.WARNING, reason=reason, error=error.message)
        logged = reason
        await asyncio.sleep(POLL_S)


def _wall_time_s(text: str) -> float:
    """A time as in RFC 3339, in seconds since 1970; without a zone it is in UTC. Raises InvalidArgumentError."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidArgumentError(f"{text!r} is no time", reason="NO_TIME") from None
