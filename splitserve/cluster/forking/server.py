"""A process that has imported what services need, and forks: a service then starts in milliseconds, not seconds.

The pattern is that of multiprocessing's fork server, with a set of modules to preload. `serve` runs in the server;
`owner.py` holds the other end of its socket. A request is one byte, the number of steps that
must be taken first, with two files: the process's output, and a stream socket over which all else is said, see
`_become`. The process becomes a child of whoever asked, which must be a subreaper: it is forked twice, and the one
between ends at once. So the server may end, in whatever way, and no process ends with it.

Only a process with a single thread may fork: a thread's locks would stay locked in the child. The server looks.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from splitserve.cluster.compute_threads import set_compute_threads
from splitserve.cluster.forking.process_title import set_process_title
from splitserve.runtime.children.launch import PROGRAM, end_with_parent

OUTPUT_AND_ANSWER = 2
"""Files of a request."""
MAX_PASSED = 16
"""Files that a process may inherit besides."""
GO = b"g"
ADOPTION_POLL_S = 0.001


Step = str | Callable[[], object]
"""What the server does before it forks: a module to import, or a function to call."""


class _Request(NamedTuple):
    steps: int
    output: int
    answer: int


def serve(control: socket.socket, owner: int, steps: Sequence[Step]) -> list[str] | None:
    """Takes the steps in order, and forks a process for each request as soon as those that it needs are taken.

    Returns in a process that was forked: the arguments of its command line. In the server: None, once `owner` has
    closed its end, or where a step fails; what was not answered by then is closed. A process that is
    forked meanwhile has this process's output until it takes on its own.
    """
    taken, pending = 0, list[_Request]()
    gc.disable()  # modules and classes stay: looking for others among them is 6% of the imports
    try:
        while True:
            idle = taken >= len(steps)
            if select.select([control], [], [], None if idle and not pending else 0)[0]:
                kind, files, _, _ = socket.recv_fds(control, 1, OUTPUT_AND_ANSWER)
                if not kind:
                    return None
                pending.append(_Request(kind[0], *files))
            # A step may have a thread until another step ends it.
            ready = [one for one in pending if one.steps <= taken] if idle or _is_alone() else []
            for request in ready:
                if _fork():
                    others = [file for one in pending if one is not request for file in one[1:]]
                    pending.clear()
                    return _become(request, owner, [control.detach(), *others])
                pending.remove(request)
                _close(request[1:])
            if not idle:
                step = steps[taken]
                try:
                    importlib.import_module(step) if isinstance(step, str) else step()
                except Exception:  # of whatever kind: libraries raise many
                    return None  # a process that is started without this server says why
                taken += 1
    finally:
        for one in pending:
            _close(one[1:])


def _is_alone() -> bool:
    """Whether this process has a single thread."""
    return len(os.listdir("/proc/self/task")) == 1


def _fork() -> bool:
    """Forks a process that is no child of this one; True in that process, and False in this one, forked or not."""
    if not _is_alone():
        return False
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # a collection in the child would write to, and so copy, all pages with objects
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        process = os.fork()
    except OSError:
        os._exit(1)
    if process:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(ADOPTION_POLL_S)
    return True


def _become(request: _Request, owner: int, others: Collection[int]) -> list[str]:
    """Makes this process what one that was executed would be: a session, output, files and environment of its own.

    Over the answer's socket it gets a JSON line of `arguments`, `environment` and `files`, the numbers under which it
    shall find the files that come with its first byte; it says its process id, and waits for GO. Ends this process if
    the owner does not say it, as it has ended or does not want it any more.
    """
    gc.enable()
    _close(others)
    os.setsid()
    end_with_parent(owner)
    answer = socket.socket(fileno=request.answer)
    with answer:
        first, files, _, _ = socket.recv_fds(answer, 1, MAX_PASSED)
        with answer.makefile("rb") as lines:
            asked = _asked(lines, first)
            try:
                answer.sendall(b"%d\n" % os.getpid())
            except OSError:
                os._exit(1)
            if lines.read(len(GO)) != GO:
                os._exit(1)
    _place([request.output, *files], [1, *asked["files"]])
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(asked["environment"])
    arguments = [str(argument) for argument in asked["arguments"]]
    set_process_title([*PROGRAM, *arguments])
    sys.argv[:] = ["splitserve", *arguments]
    return arguments


def _asked(lines: IO[bytes], first: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(first + lines.readline()))
    except ValueError:  # the owner went away while it asked
        os._exit(1)


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Makes open files known under these numbers, to programs that this process executes too."""
    free = max(numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, free) for file in files]
    _close(files)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    _close(moved)


def _close(files: Collection[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


def _close_strangers() -> None:
    """Closes what this process was given by whoever executed it, as it would be in a program that it executes."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself
            if int(name) > 2 and os.get_inheritable(int(name)):
                os.close(int(name))


def fork_here(
    theirs: socket.socket, ours: socket.socket, steps: Sequence[Step], run: Callable[[list[str]], int]
) -> int:
    """Forks the server from this process, which must have one thread; returns the server's process id here.

    There and in its processes it never returns: `run` is given the arguments of a process and returns its exit code.
    """
    owner = os.getpid()
    if pid := os.fork():
        return pid
    try:
        ours.close()
        _close_strangers()
        os.setsid()  # the terminal's Ctrl-C does not reach it
        end_with_parent(owner)
        # The title is written where the first environment is.
        environment = dict(os.environ)
        os.environ.clear()
        os.environ.update(environment)
        set_process_title([*PROGRAM, "fork-server"])
        # Libraries for arrays would start threads. How many threads compute is set later, by a call.
        set_compute_threads(1)
        stdin = os.open(os.devnull, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
        arguments = serve(theirs, owner, steps)
    except BaseException:
        os._exit(1)  # in no case does it go on as the process that it was forked from
    if arguments is None:
        os._exit(0)
    try:
        code = run(arguments)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)
