"""Starts services by forking them from a process that has their code: the owner's end of `server.py`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from splitserve.cluster.forking.server import GO, Step, fork_here

FORK_S = 120.0
"""How long a process is waited for, most of it for imports on a busy machine. Then the server is given up."""
MAX_PID_BYTES = 16
PR_SET_CHILD_SUBREAPER = 36


class AdoptedProcess:
    """A forked process that has become a child of this one; used as `asyncio.subprocess.Process` is.

    Its own loop's watcher does not know it: a file of the kernel says when it has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._file = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._file, self._reap)

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class ForkServer:
    """A fork server of this process, and its only user. One that fails is given up: whoever asks it gets None."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        control.setblocking(False)
        self._control: socket.socket | None = control
        self._pid = pid

    @classmethod
    def start(cls, steps: Sequence[Step], run: Callable[[list[str]], int]) -> ForkServer | None:
        """Forks the server, which begins to take `steps`; `run` gets a process's arguments and returns its exit
        code. None where that cannot be: this process has threads, or the system is not Linux."""
        if sys.platform != "linux" or threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
            return None
        ours, theirs = socket.socketpair()
        try:
            pid = fork_here(theirs, ours, steps, run)
        except OSError:
            ours.close()
            return None
        finally:
            theirs.close()
        return cls(ours, pid)

    async def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        *,
        files: Sequence[int] = (),
        steps: int,
    ) -> AdoptedProcess | None:
        """A process that runs `splitserve ARGUMENTS` in a session of its own, with `output` for its standard output and
        error, and `files` under the same numbers. None where the server is not there any more, or cannot fork.

        `steps`: so many of the server's must be taken before.
        """
        if self._control is None:
            return None
        asked = {"arguments": list(arguments), "environment": dict(environment), "files": list(files)}
        ours, theirs = socket.socketpair()
        try:
            with ours, adopting():
                with theirs:
                    socket.send_fds(self._control, [bytes([steps])], [output, theirs.fileno()])
                async with asyncio.timeout(FORK_S):
                    pid = await _ask(ours, json.dumps(asked).encode() + b"\n", files)
                    if pid is None:
                        return None
                    process = AdoptedProcess(pid)
                    await asyncio.get_running_loop().sock_sendall(ours, GO)
                    return process
        except (OSError, TimeoutError):
            self.close()
            return None

    def close(self) -> None:
        """Ends the server. What it forked runs on. May be called again."""
        if self._control is None:
            return
        self._control.close()
        self._control = None
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


async def _ask(answer: socket.socket, asked: bytes, files: Sequence[int]) -> int | None:
    """The process id of the process, which waits for GO; None where the server closed the socket."""
    loop = asyncio.get_running_loop()
    answer.setblocking(False)
    socket.send_fds(answer, [asked[:1]], files)
    await loop.sock_sendall(answer, asked[1:])
    said = b""
    while not said.endswith(b"\n") and (more := await loop.sock_recv(answer, MAX_PID_BYTES)):
        said += more
    return int(said) if said.endswith(b"\n") else None


_adopting = 0


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile processes whose parent ends become children of this one. Not for longer: nobody waits for others."""
    global _adopting
    _adopting += 1
    _set_subreaper(True)
    try:
        yield
    finally:
        _adopting -= 1
        _set_subreaper(_adopting > 0)


def _set_subreaper(wanted: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
