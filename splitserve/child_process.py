"""One child process of the local cluster: started in its own session, read line by line, ended for sure."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import splitserve.child_launch

Role = Literal["coordinator", "prefill", "decode"]
Event = Mapping[str, Any]

MAX_LINE_BYTES = 2**20
LAST_LINES_S = 1.0
"""How long output may still come after the process ended; a grandchild could hold the pipe open."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. `name` is unique in the cluster; `layout` says for people where it runs."""

    name: str
    role: Role
    command: tuple[str, ...]
    layout: str = ""


OnLine = Callable[[ChildSpec, str, Event | None], None]
"""Called with each line of output, and the log event in it where it is one."""


class ChildProcess:
    """Starts one child, again and again if asked to. Its standard output and error are read as one stream.

    `environment` is added to this process's own.
    """

    def __init__(
        self, spec: ChildSpec, on_line: OnLine, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.spec = spec
        self._on_line = on_line
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_words = _LastWords()

    @property
    def pid(self) -> int | None:
        """The process id of the running child."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None and self._process.returncode is None

    @property
    def last_error(self) -> str | None:
        """The last error that the child told of since its start, in one line."""
        return self._last_words.text

    async def start(self) -> None:
        """Starts the program. Its own session keeps the terminal's Ctrl-C away from it."""
        self._last_words = _LastWords()
        launcher = [sys.executable, "-I", "-S", str(Path(splitserve.child_launch.__file__))]
        self._process = await asyncio.create_subprocess_exec(
            *launcher,
            str(os.getpid()),
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self._environment},
        )
        assert self._process.stdout is not None
        self._reader = asyncio.create_task(self._read(self._process.stdout))

    async def wait(self) -> int:
        """The exit code, negative for a signal, after the last line was read."""
        assert self._process is not None
        assert self._reader is not None
        code = await self._process.wait()
        read, _ = await asyncio.wait([self._reader], timeout=LAST_LINES_S)
        self._reader.cancel()
        for reader in read:
            if not reader.cancelled():
                reader.result()
        return code

    def terminate(self) -> None:
        """Asks the process to end: SIGTERM."""
        if self.running and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends the process and everything in its group: SIGKILL."""
        if self.running and self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            event = _parse_event(line)
            self._last_words.hear(line, event)
            self._on_line(self.spec, line, event)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _LastWords:
    """Picks the line that tells best why a process ended: its own `error:` line, a logged error, any text."""

    def __init__(self) -> None:
        self._said: str | None = None
        self._logged: str | None = None
        self._other: str | None = None

    @property
    def text(self) -> str | None:
        return self._said or self._logged or self._other

    def hear(self, line: str, event: Event | None) -> None:
        if event is None:
            if line.startswith("error: "):
                self._said = line.removeprefix("error: ")
            elif line.strip():
                self._other = line.strip()
        elif event.get("level") == "error":
            self._logged = str(event.get("error") or event.get("message") or event["event"])


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    pending = b""
    while chunk := await stream.read(2**16):
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
        if len(pending) > MAX_LINE_BYTES:
            yield pending.decode(errors="replace")
            pending = b""
    if pending:
        yield pending.decode(errors="replace")


def _parse_event(line: str) -> Event | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("event"), str) else None
