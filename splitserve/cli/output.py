"""Writing to standard output."""

from __future__ import annotations

import os
import sys

import typer

EXIT_BROKEN_PIPE = 141
"""What a shell reports of a program that ended with SIGPIPE."""


def write(text: str) -> None:
    """Writes and flushes. When nobody reads any more, ends the program quietly with EXIT_BROKEN_PIPE."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
