"""Locks of one byte of an open file, which end with the open file and not with the process: `F_OFD_...` of fcntl(2)."""

from __future__ import annotations

import fcntl
import os
import struct


def is_locked(file: int, at: int) -> bool:
    """Whether another open file has locked this byte. Raises OSError where the system has no such locks."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, at))
    return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)


def set_lock(file: int, kind: int, at: int) -> None:
    """`kind`: `fcntl.F_WRLCK` or `F_UNLCK`. Raises BlockingIOError or PermissionError while another has the byte."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(kind, at))


def _flock(kind: int, at: int) -> bytes:
    """`struct flock`, for one byte."""
    return struct.pack("@hhqqi4x", kind, os.SEEK_SET, at, 1, 0)
