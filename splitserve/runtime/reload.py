"""Files that are read again when they change: the one way in which tenants, policies, routes and certificates reload.

Files that cannot be read, parsed or accepted change nothing: the old content stays in force, the error is logged with
its line, and a metric shows it until the files are right again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.runtime.process import calling_on_signal

POLL_INTERVAL_S = 0.5
"""How often files are checked for changes. A changed file is read once it has not changed for one interval: its writer
may not be done."""

T = TypeVar("T")
Stamp = dict[Path, tuple[int, ...] | None]
"""(mtime, ctime in ns, inode, size) by file; None for one that is missing. A change of permissions changes ctime."""


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    """One reading: what was loaded, or why not."""

    stamp: Stamp
    content: T | None
    error: Exception | None
    torn: bool
    """Whether the files changed while they were read."""


class ReloadedFiles(Generic[T]):
    """The content of one file, or of several that belong together; always a whole that `load` accepted.

    `load` reads the files (on a thread when followed) and may raise anything. `adopt` puts the result of `load` into
    force; `adopt` may raise as well, and then must have changed nothing.
    """

    def __init__(
        self,
        name: str,
        paths: Callable[[], Sequence[Path]],
        load: Callable[[], T],
        adopt: Callable[[T], None],
    ) -> None:
        """`name` is what metrics and logs call the files. Reads nothing yet."""
        self.name = name
        self.problem = ""
        """Why the present files were refused; empty if they were not."""
        self.outcomes = {"adopted": 0, "rejected": 0}
        self._paths, self._load, self._adopt = paths, load, adopt
        self._tried: Stamp = {}
        self._seen: Stamp = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Reads the files for the first time. Raises what `load` raises."""
        stamp = self._stamp()
        self._adopt(self._load())
        self._tried = self._seen = self._stamp() | stamp  # the content may name further files

    def reload(self) -> bool:
        """Reads the files now. Returns whether they were adopted."""
        return self._apply(self._read())

    async def reload_in_thread(self) -> bool:
        """Reads the files on a thread and adopts them on the event loop. Returns whether they were adopted."""
        return self._apply(await asyncio.to_thread(self._read))

    @property
    def rejected(self) -> bool:
        """Whether the present files were refused."""
        return bool(self.problem)

    def is_due(self) -> bool:
        """Whether the files have changed since they were read last, and not since the previous call."""
        stamp = self._stamp()
        still, self._seen = stamp == self._seen, stamp
        return still and stamp != self._tried

    def _read(self) -> _Read[T]:
        with self._lock:
            stamp = self._stamp()
            content: T | None = None
            error: Exception | None = None
            try:
                content = self._load()
            except Exception as caught:
                error = caught
            return _Read(stamp, content, error, torn=self._stamp() != stamp)

    def _apply(self, read: _Read[T]) -> bool:
        if read.torn:
            return False  # what was read may be half of each version; the next check sees the change
        error = read.error
        if error is None:
            try:
                self._adopt(read.content)  # type: ignore[arg-type]
            except Exception as caught:
                error = caught
        self._tried = {path: read.stamp.get(path, now) for path, now in self._stamp().items()}
        self.outcomes["adopted" if error is None else "rejected"] += 1
        if error is None:
            self.problem = ""
            log_event("file.reloaded", file=self.name)
            return True
        refusal = error if isinstance(error, SplitserveError) else None
        self.problem = refusal.message if refusal else f"{type(error).__name__}: {error}"
        field = refusal.field if refusal else None
        log_event("file.rejected", level=logging.ERROR, file=self.name, field=field, error=self.problem)
        return False

    def _stamp(self) -> Stamp:
        return {path: _stamp_of(path) for path in self._paths()}


class FileWatcher:
    """Follows all files of a process that reload. On SIGHUP all of them are read again."""

    def __init__(self, *files: ReloadedFiles[Any] | None) -> None:
        """None stands for files that are not configured."""
        self.files = tuple(watched for watched in files if watched is not None)

    async def follow(self, *, hangup: bool = True) -> None:
        """Reloads files that have changed, until cancelled. Returns at once if there are no files. `hangup`: whether
        SIGHUP asks for a reload; otherwise it means the end of the process's terminal."""
        if not self.files:
            return
        events = [asyncio.Event() for _ in self.files]

        def on_hangup() -> None:
            for event in events:
                event.set()

        with calling_on_signal(signal.SIGHUP, on_hangup) if hangup else nullcontext():
            async with asyncio.TaskGroup() as group:
                for files, event in zip(self.files, events, strict=True):
                    group.create_task(_followed(files, event))


async def _followed(files: ReloadedFiles[Any], hangup: asyncio.Event) -> None:
    """Follows the files of one name, in a task of their own: files that take long to read hold up no others."""
    while True:
        signalled = False
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_INTERVAL_S):
                signalled = await hangup.wait()
        hangup.clear()
        if signalled or await asyncio.to_thread(files.is_due):
            await files.reload_in_thread()


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size
