"""Writing text, JSON and tables to standard output, and the progress of long work to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitserve.models.sources import Progress
EXIT_BROKEN_PIPE = 141
"""Exit code that a shell reports for SIGPIPE."""
STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "connecting": "yellow",
    "draining": "magenta",
    "standby": "cyan",
    "slow-lane": "red",
    "circuit-open": "red",
}
"""Styles of a worker's states."""
PIPED_WIDTH = 200
"""Columns of a table that goes to a pipe, which has no width: programs cannot parse a table that is folded to 80."""


def write(text: str) -> None:
    """Writes and flushes. If the reader has gone, exits quietly with EXIT_BROKEN_PIPE."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None


def write_json(shown: Any) -> None:
    """Writes one JSON object as a line."""
    write(json.dumps(shown, ensure_ascii=False) + "\n")


def drawn(*parts: RenderableType, piped_width: int = PIPED_WIDTH) -> str:
    """The parts as rich draws them, one below the other, as wide as the terminal, or `piped_width` columns for a pipe.
    Without colors where NO_COLOR is set."""
    # Imported here: rich is slow to import, and not all commands draw.
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else piped_width, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


@contextmanager
def shown_progress(name: str, *, lines: bool = True) -> Iterator[Progress]:
    """Within the context, progress is shown on standard error: on a terminal a bar, elsewhere, with `lines`, one line
    for each step; the first word of a text names its step. Without colors where NO_COLOR is set."""
    if not sys.stderr.isatty():
        yield _plain(name) if lines else lambda _what, _fraction: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda what, fraction: bar.update(task, description=f"{name}: {what}", completed=fraction)


def _plain(name: str) -> Progress:
    shown: set[str] = set()

    def progress(what: str, fraction: float) -> None:
        # A step's text may contain changing numbers; a log gets each step once.
        step = what.split(" ", 1)[0]
        if step not in shown:
            shown.add(step)
            print(f"{name}: {what}", file=sys.stderr, flush=True)

    return progress
