"""Processes that a fork server starts, one server for each set of imports and test process."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from splitserve.runtime.waiting import OwnClock
from tests.support.cluster.fork_server import GO
from tests.support.waiting import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S
"""Of the server, which imports torch first."""
POLL_S = 0.01
PR_SET_CHILD_SUBREAPER = 36
_lock = threading.Lock()

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


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile processes whose parent ends become children of this one. Not for longer: nobody waits for others."""
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(wanted: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


class ForkServer:
    """A fork server, used from any thread of a test process."""

    def __init__(self, imports: Imports) -> None:
        self._control, other = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.cluster.fork_server"]
        command += [str(other.fileno()), str(os.getpid()), imports]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._server = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        other.close()
        self._started: list[ForkedProcess] = []

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, module: str = "launcher"
    ) -> ForkedProcess:
        """Runs `python -m MODULE ARGUMENTS` in a session of its own; its output is appended to `log`."""
        asked = {"arguments": [module, *arguments], "environment": dict(environment)}
        ours, theirs = socket.socketpair()
        with _lock, adopting(), ours, log.open("ab") as output:
            with theirs:
                socket.send_fds(self._control, [b"f"], [output.fileno(), theirs.fileno()])
            ours.settimeout(START_TIMEOUT_S)
            ours.sendall(json.dumps(asked).encode() + b"\n")
            said = ours.makefile("rb").readline()
            assert said, "the fork server does not fork"
            ours.sendall(GO)
        process = ForkedProcess(int(said))
        self._started.append(process)
        return process

    def stop(self) -> None:
        """Ends the server. Kills what it has started and still runs, and raises AssertionError then."""
        self._control.close()
        assert self._server.wait(START_TIMEOUT_S) == 0
        left = [process for process in self._started if process.poll() is None]
        for process in left:
            process.kill()
            process.wait()
        assert not left, f"processes left behind: {len(left)}"


class ForkedProcess:
    """A forked child of this process. Used as `subprocess.Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`.

        A virtual machine may stand still for minutes, with its clock going on: in such a time no process could end.
        """
        clock, waited_s = OwnClock(time.monotonic()), 0.0
        while (code := self.poll()) is None:
            if timeout is not None and waited_s > timeout:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(POLL_S)
            waited_s += clock.tick(time.monotonic())
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
