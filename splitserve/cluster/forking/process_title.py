"""What `ps` shows of a forked process: its own command in place of the one that it was forked from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_STAT = Path("/proc/self/stat")
_ARG_START, _ENV_END = 45, 48
"""Indices among the fields of `stat` that follow the command's name; see proc_pid_stat(5)."""
_SHOWN_BYTES = 4095
"""The kernel shows no more of a title."""


def set_process_title(command: Sequence[str]) -> None:
    """Writes a command, with spaces between its arguments, over this process's arguments and the environment that
    follows them in memory: the first that it had, which libc has copied once `os.environ` was replaced. Cut to what
    fits there. Linux only; where it cannot be done, nothing changes.

    As setproctitle(3) does it, and as the kernel expects it: where the last byte of the arguments is not zero, they are
    a title, which ends at the first zero.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = _STAT.read_text().rpartition(")")[2].split()
        start, arguments_end, environment_start, end = map(int, fields[_ARG_START : _ENV_END + 1])
        if not 0 < start < arguments_end:
            return
        room = (end if environment_start == arguments_end else arguments_end) - start
        title = " ".join(command).encode()[: min(room, _SHOWN_BYTES) - 1]
        ctypes.memmove(start, title + b"\0", len(title) + 1)
        if len(title) + 1 < arguments_end - start:
            ctypes.memset(arguments_end - 1, ord("."), 1)
