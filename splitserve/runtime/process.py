"""Process-wide behaviour of services: signal handling, environment, open files and garbage collection."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

from splitserve.logs import log_event
from splitserve.runtime.children_end import CHILD_S, KILLED_S, end_children

T = TypeVar("T")

SECOND_SIGNAL_EXIT_CODE = 130
END_S = 120.0
"""How long a service may take to end beyond its drain; its own deadlines add up to less than that. Time in which the
machine stands still counts."""
LAST_S = CHILD_S + KILLED_S + 1.0
"""How long ending the children and writing the stacks may take."""


DEVICE_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


def number_devices_like_nvidia_smi() -> None:
    """Makes `cuda:N` the device that nvidia-smi numbers N, unless the variable is set. Call it before CUDA starts.

    By default CUDA puts the fastest device first, so that numbers would mean other devices than in a GPU inventory.
    """
    os.environ.setdefault(DEVICE_ORDER_VARIABLE, "PCI_BUS_ID")


def stop_signal(limit_s: float) -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second one ends the process and its children at once.

    `limit_s`: so many seconds after the first one the process ends in any case, see `end_in_any_case`. Call it on the
    running event loop.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            _end(SECOND_SIGNAL_EXIT_CODE, 0.0)
        stop.set()
        end_in_any_case(limit_s)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


@contextmanager
def calling_on_signal(
    number: signal.Signals, callback: Callable[[], None], *, ignore_after: bool = False
) -> Iterator[None]:
    """Within the context, the signal calls `callback` on the event loop; off the main thread, where loops handle no
    signals, it does not. `ignore_after`: the signal is ignored after the context, instead of its default action."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, callback)
    except (RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        if ignore_after:
            loop.add_signal_handler(number, lambda: None)
        else:
            loop.remove_signal_handler(number)


def end_in_any_case(limit_s: float) -> None:
    """Ends the process in `limit_s` seconds, with code 1, if it has not ended by itself. Then the Python stacks of all
    threads are written to stderr, and the children end; see `end_children`. It does not need the event loop.

    If that cannot run, because a thread keeps the interpreter's lock or nobody reads an output, the process ends LAST_S
    later without its children. The same may happen if the process stood still (SIGSTOP) until then."""
    stderr = sys.__stderr__ or 2
    faulthandler.dump_traceback_later(limit_s + LAST_S, exit=True, file=stderr)

    def end() -> None:
        time.sleep(limit_s)
        faulthandler.dump_traceback(stderr, all_threads=True)
        _end(1, CHILD_S)

    threading.Thread(target=end, name="end-in-any-case", daemon=True).start()


def leave_at_once(code: int = 0) -> NoReturn:
    """Ends the process without the interpreter's own end, which joins threads and calls libraries' hooks however long
    these take. For a service that has closed its resources, or cannot close them. The children end first; see
    `end_children`."""
    _end(code, CHILD_S)


def _end(code: int, patience_s: float) -> NoReturn:
    try:
        end_children(patience_s)
        if patience_s > 0:
            _flush_output()  # waits for whoever reads it
    finally:
        os._exit(code)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where a process is started with the file closed
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables in the environment of the process, and of those that it starts, while the context is open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def unless_stopped(
    starting: Awaitable[T],
    stop: asyncio.Event,
    leave: Callable[[int], object] = leave_at_once,
    patience_s: float = 0.0,
) -> T:
    """The result of a start that cannot be cancelled, such as loading weights on a thread. Once `stop` is set the start
    has `patience_s` seconds more; then the process ends in the middle of it, with code 0: no client uses it yet."""
    begun, stopped = asyncio.ensure_future(starting), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([begun, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            await asyncio.wait([begun], timeout=patience_s)
        if not begun.done():
            log_event("process.stopped_at_start", waited_s=patience_s)
            leave(0)
        return await begun
    finally:
        stopped.cancel()
        begun.cancel()


RESERVED_FILES = 256
"""Files and sockets of a service besides its clients' connections: logs, libraries, channels to workers."""
LEAST_CONNECTIONS = 16
MAX_OPEN_FILES = 2**20
"""Where raising the soft limit stops; more would only cost the kernel memory."""


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard limit; returns it. The soft limit is often 1024, for programs
    that call `select`, which nothing here does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _file_limit()


def connections_that_fit(wanted: int, listeners: int = 1) -> int:
    """The lesser of `wanted` and the connections that the limit of open files leaves for each listener."""
    return min(wanted, max(LEAST_CONNECTIONS, (_file_limit() - RESERVED_FILES) // listeners))


def _file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


YOUNG_GENERATION_THRESHOLD = 5_000
"""New container objects between two collections of the youngest generation. Python's default of 700 means hundreds
of collections a second under load, which find almost nothing: messages, tasks and futures end by reference count. A
refused request does not, because gRPC's abort ties its error to its frames: some 50 objects. A collection that finds
20,000 of them stops the event loop for 12 ms and more, one of 5,000 for 3."""


def relax_collector() -> None:
    """Excludes all present objects, mostly modules and classes, from later collections. Call once, after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_GENERATION_THRESHOLD, 20, 50)
