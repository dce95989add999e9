"""A notice that somebody writes to a file: an agent of the machine, a container's hook, a test."""

from __future__ import annotations

import asyncio
import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path

from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.spot.source import NoticeSource, left_s, wall_time_s

MAX_CHARACTERS = 64
REREAD_S = 0.1
"""A writer makes the file first, and then writes the time."""


class FileNotices(NoticeSource):
    """A file that is a notice once it exists. It is empty, which means `notice_s` from when it is seen, or has the
    time in the form of RFC 3339.

    Files outlive machines: by one on a disk that was kept, each new machine would be taken away at once, for ever. So a
    notice is none whose end, for an empty file `notice_s` after it was written, had passed before this source was made:
    the machine has outlived it. Metadata servers speak of the machine as it is now.
    """

    name = "file"

    def __init__(
        self,
        path: Path,
        notice_s: float,
        wall_clock: Callable[[], float] = time.time,
        since_wall_s: float | None = None,
    ) -> None:
        """`since_wall_s`: the machine was there at that time, seconds since the epoch. Default: now."""
        self._path, self._notice_s, self._wall_clock = path, notice_s, wall_clock
        self._since_wall_s = wall_clock() if since_wall_s is None else since_wall_s
        self._outlived: float | None = None

    async def time_left_s(self) -> float | None:
        """See NoticeSource."""
        found = await asyncio.to_thread(self._read)
        if found is not None and not found[0]:
            await asyncio.sleep(REREAD_S)
            found = await asyncio.to_thread(self._read) or found
        if found is None:
            return None
        text, written_wall_s = found
        ends_wall_s = wall_time_s(text) if text else written_wall_s + self._notice_s
        if ends_wall_s < self._since_wall_s:
            self._ignore(written_wall_s, ends_wall_s)
            return None
        return left_s(ends_wall_s, self._wall_clock()) if text else self._notice_s

    def _ignore(self, written_wall_s: float, ends_wall_s: float) -> None:
        if self._outlived != written_wall_s:
            self._outlived = written_wall_s
            ended_s = round(self._wall_clock() - ends_wall_s, 1)
            log_event("spot.outlived", level=logging.WARNING, file=str(self._path), ended_s_ago=ended_s)

    def _read(self) -> tuple[str, float] | None:
        """What it says, and when it was written, seconds since the epoch; None while it does not exist."""
        try:
            found = self._path.stat()
            if not stat.S_ISREG(found.st_mode):  # reading a pipe may never end
                raise UnavailableError(f"{self._path}: no regular file", reason="FILE_UNREADABLE")
            with self._path.open("rb") as file:
                return file.read(MAX_CHARACTERS).decode(errors="replace").strip(), found.st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self._path}: {error.strerror}"
            raise UnavailableError(message, reason="FILE_UNREADABLE") from None
