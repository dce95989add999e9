"""Reads whole files that somebody else wrote: of a bounded size, and without waiting for ever.

A setting or an option may name anything: a device without an end, a pipe that nobody writes to, or the wrong, huge
file. All files that a user names are read here, so each of them fails alike: with an OSError that says why, or with a
ConfigError that also names the setting.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import Literal

from splitserve.errors import ConfigError

SMALL_FILE_BYTES = 4 * 2**20
"""Most bytes of a file of settings: tenants, policies, routes, keys, certificates."""
PIPE_WAIT_S = 5.0
"""How long a pipe, such as the shell's `<(command)`, has to give all that it holds. Whoever reads may be an event loop,
which takes no signal meanwhile."""
PIPE_SILENCE_S = 60.0
"""How long a pipe may give nothing, however long it takes in all, where a command reads it before there is an event
loop, so that a signal ends the process: `--config <(gpg -d ...)` asks for a passphrase, and `--trace <(zcat FILE)`
takes its time."""
_PIECE_BYTES = 2**20
_NULL_DEVICE = os.makedev(1, 3)


Pipes = Literal["brief", "patient", "none"]
"""What a pipe may be read as: one that ends within `PIPE_WAIT_S`, one that is never silent for `PIPE_SILENCE_S`, or
nothing that is read at all."""


def read_small_file(path: Path, most_bytes: int = SMALL_FILE_BYTES, *, pipes: Pipes = "brief") -> bytes:
    """The content of a file, or of a pipe such as `pipes` has it; /dev/null is an empty file.

    Raises OSError, also for anything else (a device, a socket, a folder) and for more than `most_bytes`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_pipe = stat.S_ISFIFO(found.st_mode)
        if not is_pipe and not stat.S_ISREG(found.st_mode) and found.st_rdev != _NULL_DEVICE:
            raise OSError(errno.EINVAL, "it is neither a file nor a pipe")
        if is_pipe and pipes == "none":
            raise OSError(errno.EINVAL, "it is no regular file but a pipe")
        return _read(descriptor, most_bytes, pipes if is_pipe else "none")
    finally:
        os.close(descriptor)


def read_small_text(path: Path, most_bytes: int = SMALL_FILE_BYTES, *, pipes: Pipes = "brief") -> str:
    """The same as UTF-8 text, line ends as they are. Raises OSError and UnicodeDecodeError."""
    return read_small_file(path, most_bytes, pipes=pipes).decode("utf-8")


def read_named_file(
    path: Path, setting: str, most_bytes: int = SMALL_FILE_BYTES, *, pipes: Pipes = "brief"
) -> bytes:
    """`read_small_file` of what a setting or an option names. Raises ConfigError (field `setting`)."""
    try:
        return read_small_file(path, most_bytes, pipes=pipes)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", field=setting) from None


def read_named_text(
    path: Path,
    setting: str,
    most_bytes: int = SMALL_FILE_BYTES,
    *,
    pipes: Pipes = "brief",
    encoding: str = "utf-8",
) -> str:
    """The same as text in UTF-8 (`encoding` utf-8-sig: without a byte order mark). Raises ConfigError."""
    content = read_named_file(path, setting, most_bytes, pipes=pipes)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"{setting}: {path} is no UTF-8 text, at byte {error.start}"
        raise ConfigError(message, field=setting) from None


def _read(descriptor: int, most_bytes: int, pipes: Pipes) -> bytes:
    """`pipes` is none for a file, which is read however slow its disk is."""
    patient = pipes == "patient"
    wait_s = None if pipes == "none" else PIPE_SILENCE_S if patient else PIPE_WAIT_S
    pieces: list[bytes] = []
    room = most_bytes + 1
    until_s = time.monotonic() + (wait_s or 0.0)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while room > 0:
        # What is there is read in any case: this process may have been paused.
        heard = wait_s is None or bool(poll.poll(max(0.0, until_s - time.monotonic()) * 1000))
        try:
            piece = os.read(descriptor, min(room, _PIECE_BYTES))
        except BlockingIOError:  # there is a writer, which has written nothing yet
            if heard:
                continue
            why = f"has given nothing for {wait_s:g} s" if patient else f"has not ended within {wait_s:g} s"
            raise TimeoutError(errno.ETIMEDOUT, f"the pipe {why}") from None
        if not piece and not heard:
            raise TimeoutError(errno.ETIMEDOUT, "nobody writes to the pipe")
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        room -= len(piece)
        if wait_s is not None and patient:
            until_s = time.monotonic() + wait_s
        elif wait_s is not None and room > 0 and time.monotonic() >= until_s:
            raise TimeoutError(errno.ETIMEDOUT, f"the pipe has not ended within {wait_s:g} s")
    raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes")
