"""A notice that somebody writes to a file: an agent of the machine, a container's hook, a test."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Callable
from pathlib import Path

from splitserve.errors import UnavailableError
from splitserve.spot.source import NoticeSource, left_until_s

MAX_CHARACTERS = 64
REREAD_S = 0.1
"""A writer makes the file first, and then writes the time."""


class FileNotices(NoticeSource):
    """A file that is a notice once it exists. It is empty, which means `notice_s` from when it is seen, or has the
    time in the form of RFC 3339."""

    name = "file"

    def __init__(self, path: Path, notice_s: float, wall_clock: Callable[[], float] = time.time) -> None:
        self._path, self._notice_s, self._wall_clock = path, notice_s, wall_clock

    async def time_left_s(self) -> float | None:
        """See NoticeSource."""
        text = await asyncio.to_thread(self._read)
        if text == "":
            await asyncio.sleep(REREAD_S)
            text = await asyncio.to_thread(self._read) or text
        if text is None:
            return None
        return left_until_s(text, self._wall_clock()) if text else self._notice_s

    def _read(self) -> str | None:
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):  # reading a pipe may never end
                raise UnavailableError(f"{self._path}: no regular file", reason="FILE_UNREADABLE")
            with self._path.open("rb") as file:
                return file.read(MAX_CHARACTERS).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self._path}: {error.strerror}"
            raise UnavailableError(message, reason="FILE_UNREADABLE") from None
