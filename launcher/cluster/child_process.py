"""A child process of the local cluster: runs in its own session, its output is read line by line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from splitserve.runtime.child_launch import launcher

Role = Literal["coordinator", "prefill", "decode", "worker"]
Event = Mapping[str, Any]

MAX_LINE_BYTES = 2**20
SERVES_EVENTS = frozenset({"coordinator.ready", "registry.registered"})
"""Log events after which a child takes part in the cluster: errors that it logged before no longer matter."""
LAST_LINES_S = 1.0
"""How long to read output after the process ended, in case a grandchild holds the pipe open."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start. `name` is unique in the cluster; `layout` describes for people where it runs."""

    name: str
    role: Role
    command: tuple[str, ...]
    layout: str = ""
    least_stop_s: float = 0.0
    """Least time in seconds that the process gets to end by itself: it may have to end processes of its own, even
    before it serves."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for this process where this one does not have them itself."""


OnLine = Callable[[ChildSpec, str, Event | None], None]
"""Called with each line of output, and the log event if the line is one."""


@dataclass(eq=False)
class ChildProcess:
    """A child that can be started repeatedly. Its standard output and error are read as one stream."""

    spec: ChildSpec
    on_line: OnLine
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_error = _LastError()

    @property
    def pid(self) -> int | None:
        """The process id of the running child."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def last_error(self) -> str | None:
        """The child's last error since its start, in one line."""
        return self._last_error.text

    async def start(self) -> None:
        """Starts the program in its own session, so that the terminal's Ctrl-C does not reach it."""
        self._last_error = _LastError()
        read, write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher(),
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
                env={**self.spec.environment, **os.environ, **self.environment},
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._reader = asyncio.create_task(self._read(read))

    async def wait(self) -> int:
        """Waits for the end and the last line; returns the exit code, negative for a signal."""
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
        """Sends SIGTERM."""
        if self.running and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL to the process group."""
        if self.running and self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, output: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(output, "rb", buffering=0)
        )
        try:
            async for line in _lines(stream):
                event = _parse_event(line)
                self._last_error.add(line, event)
                self.on_line(self.spec, line, event)
        finally:
            transport.close()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _LastError:
    """Picks the line that best explains why a process ended, or does not serve. In this order: its `error:` line; the
    error that it logged last, which before it serves may have any level; its last line of plain text."""

    def __init__(self) -> None:
        self._printed: str | None = None
        self._logged: str | None = None
        self._last_line: str | None = None
        self._serves = False

    @property
    def text(self) -> str | None:
        return self._printed or self._logged or self._last_line

    def add(self, line: str, event: Event | None) -> None:
        if event is None:
            if line.startswith("error: "):
                self._printed = line.removeprefix("error: ")
            elif line.strip():
                self._last_line = line.strip()
        elif event["event"] in SERVES_EVENTS:
            self._serves, self._logged = True, None
        elif event.get("level") == "error" or (event.get("error") and not self._serves):
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


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with exponential back-off; gives up on a crash loop. Times in seconds."""

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    last_delay_s: float = 8.0

    def delay_s(self, deaths: Sequence[float], now_s: float) -> float | None:
        """Time to wait before the next start, or None to give up.

        `deaths` are the times at which the process died since it was last ready, including the latest.
        """
        recent = [death for death in deaths if now_s - death <= self.window_s]
        if len(recent) >= self.max_deaths:
            return None
        return float(min(self.first_delay_s * 2 ** max(0, len(recent) - 1), self.last_delay_s))
