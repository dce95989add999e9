"""Processes that a fork server starts, one server for each set of imports and test process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

START_TIMEOUT_S = 120.0
"""Of the server, which imports torch first."""
POLL_S = 0.01

Imports = Literal["simulated", "torch", "vllm"]


class Process(Protocol):
    """What tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkServer:
    """The client's end of `tests.support.cluster.fork_server`. Thread-safe."""

    def __init__(self, imports: Imports) -> None:
        self._control, other = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.cluster.fork_server", str(other.fileno()), imports]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._server = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        other.close()
        self._lock = threading.Lock()
        self._lines = b""
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """Runs `splitserve ARGUMENTS` in a session of its own; its output is appended to `log`."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        with self._lock:
            self._control.sendall(json.dumps(request).encode() + b"\n")
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self._pids:
                assert time.monotonic() < deadline, "the fork server does not answer"
                self._read(POLL_S)
            return ForkedProcess(self, self._pids.pop())

    def code(self, pid: int) -> int | None:
        """A child's exit code, as `subprocess` gives it; None while it runs."""
        with self._lock:
            self._read(0)
            return self._codes.get(pid)

    def stop(self) -> None:
        """Ends the server. Raises AssertionError if a child still runs; the server kills it."""
        self._control.close()
        assert self._server.wait(START_TIMEOUT_S) == 0, "processes left behind"

    def _read(self, timeout_s: float) -> None:
        while select.select([self._control], [], [], timeout_s)[0]:
            received = self._control.recv(2**16)
            assert received, "the fork server has ended"
            *lines, self._lines = (self._lines + received).split(b"\n")
            for message in map(json.loads, lines):
                if "ended" in message:
                    self._codes[message["ended"]] = message["code"]
                else:
                    self._pids.append(message["pid"])
            timeout_s = 0


class ForkedProcess:
    """A child of the fork server. Used as `subprocess.Popen` is."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._server.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def fork_server(imports: Imports) -> ForkServer:
    """The server of this test process, started at its first use."""
    server = ForkServer(imports)
    _started.append(server)
    return server


_started: list[ForkServer] = []


def stop_fork_servers() -> None:
    """At the end of the test process. Raises AssertionError if something that they started still runs."""
    while _started:
        _started.pop().stop()
    fork_server.cache_clear()
