"""Reads whole files that a user names: of a bounded size, and without waiting for ever.

A setting or an option may name anything: a device without an end, a pipe that nobody writes to, or a wrong, huge file.
Files that cannot be read all fail alike: with an OSError that says why, or with a ConfigError that also names the
setting.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path

from splitserve.errors import ConfigError

SMALL_FILE_BYTES = 4 * 2**20
"""Most bytes of a file of settings: tenants, policies, routes, keys, certificates."""
PIPE_SILENCE_S = 60.0
"""How long a pipe, such as the shell's `<(command)`, may be silent; in all it may take longer: `--config <(gpg -d ...)`
asks for a passphrase, and `--trace <(zcat FILE)` takes its time."""
_PIECE_BYTES = 2**20
_NULL_DEVICE = os.makedev(1, 3)


def read_small_file(path: Path, most_bytes: int = SMALL_FILE_BYTES, *, may_be_pipe: bool = True) -> bytes:
    """The content of a file, or of a pipe that is never silent for PIPE_SILENCE_S; /dev/null is an empty file.

    `may_be_pipe`: False for a file that will be opened again later. Raises OSError, also for anything else (a device, a
    socket, a folder) and for more than `most_bytes`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_pipe = stat.S_ISFIFO(status.st_mode)
        if not is_pipe and not stat.S_ISREG(status.st_mode) and status.st_rdev != _NULL_DEVICE:
            raise OSError(errno.EINVAL, "it is neither a file nor a pipe")
        if is_pipe and not may_be_pipe:
            raise OSError(errno.EINVAL, "it is no regular file but a pipe")
        return _read(descriptor, most_bytes, is_pipe=is_pipe)
    finally:
        os.close(descriptor)


def read_small_text(path: Path) -> str:
    """`read_small_file` as UTF-8 text, line ends as they are. Raises OSError and UnicodeDecodeError."""
    return read_small_file(path).decode("utf-8")


def read_named_file(
    path: Path, setting: str, most_bytes: int = SMALL_FILE_BYTES, *, may_be_pipe: bool = True
) -> bytes:
    """`read_small_file` of what a setting or an option names. Raises ConfigError (field `setting`)."""
    try:
        return read_small_file(path, most_bytes, may_be_pipe=may_be_pipe)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", field=setting) from None


def read_named_text(path: Path, setting: str, most_bytes: int = SMALL_FILE_BYTES) -> str:
    """`read_named_file` as UTF-8 text. Raises ConfigError."""
    content = read_named_file(path, setting, most_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{setting}: {path} is no UTF-8 text, at byte {error.start}"
        raise ConfigError(message, field=setting) from None


def _read(descriptor: int, most_bytes: int, *, is_pipe: bool) -> bytes:
    pieces: list[bytes] = []
    room = most_bytes + 1
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while room > 0:
        # Bytes that are there are read even after a silence: this process may have been paused.
        is_silent = is_pipe and not poll.poll(PIPE_SILENCE_S * 1000)
        try:
            piece = os.read(descriptor, min(room, _PIECE_BYTES))
        except BlockingIOError:  # there is a writer, which has written nothing yet
            if is_silent:
                message = f"the pipe has given nothing for {PIPE_SILENCE_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, message) from None
            continue
        if not piece and is_silent:
            raise TimeoutError(errno.ETIMEDOUT, "nobody writes to the pipe")
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        room -= len(piece)
    raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes")
