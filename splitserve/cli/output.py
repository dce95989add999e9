"""Writing to standard output."""

from __future__ import annotations

import os
import sys

import typer

EXIT_BROKEN_PIPE = 141
"""Exit code that a shell reports for SIGPIPE."""


def write(text: str) -> None:
    """Writes and flushes. If the reader has gone, exits quietly with EXIT_BROKEN_PIPE."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
