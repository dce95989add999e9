"""Ends the child processes of a process, and removes its files, before it leaves without the interpreter's own end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

CHILD_S = 3.0
"""How long a child may take to end by SIGTERM."""
KILLED_S = 2.0
"""How long the kernel may take to end a killed process."""
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""A process that ends by itself after the last process that uses it, and then frees the shared memory they left."""

_leftovers: list[Callable[[], object]] = []


def remove_at_end(remove: Callable[[], object]) -> None:
    """Makes `end_children` call `remove` once the children have ended, on any thread; `keep_at_end` takes it back."""
    _leftovers.append(remove)


def keep_at_end(remove: Callable[[], object]) -> None:
    """Takes `remove_at_end` back. Idempotent."""
    if remove in _leftovers:
        _leftovers.remove(remove)


def end_children(patience_s: float = CHILD_S) -> list[int]:
    """Ends all processes that this one and its children have started, each by its id; returns those that were killed.

    They get SIGTERM, and SIGKILL if they have not ended `patience_s` seconds later (0: SIGKILL at once). Takes at most
    `patience_s + KILLED_S`. A process whose parent has ended is no descendant any more, and is not found.
    """
    killed = _end_all(patience_s) if _has_children() else []
    while _leftovers:
        with suppress(OSError):
            _leftovers.pop()()
    return killed


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_all(patience_s: float) -> list[int]:
    # Imported here: it takes its time, and most services have no children.
    import psutil

    children = _descendants()
    if patience_s > 0:
        _each(children, psutil.Process.terminate)
        psutil.wait_procs(children, timeout=patience_s)
        children = list({*filter(_lives, children), *_descendants()})
    _each(children, psutil.Process.kill)
    psutil.wait_procs(children, timeout=KILLED_S)
    return sorted(child.pid for child in children)


def _descendants() -> list[psutil.Process]:
    import psutil

    return [child for child in psutil.Process().children(recursive=True) if _lives(child)]


def _lives(process: psutil.Process) -> bool:
    import psutil

    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        return not ended and RESOURCE_TRACKER not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _each(processes: list[psutil.Process], order: Callable[[psutil.Process], None]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):
            order(process)
