"""`splitserve model`: embedded models on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli.output import write

if TYPE_CHECKING:
    from splitserve.models.sources import Progress


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(help="Fetch and list embedded models.", no_args_is_help=True)
    group.command("fetch")(fetch)
    group.command("list")(list_models)
    app.add_typer(group, name="model")


def fetch(name: Annotated[str, typer.Argument(help="Name of an embedded model.")]) -> None:
    """Fetch an embedded model into the local cache."""
    write(f"{name} is in {fetch_with_progress(name)}\n")


def list_models() -> None:
    """List embedded models and their folders."""
    from splitserve.errors import NotFoundError
    from splitserve.models.sources import EMBEDDED, resolve_model

    for name in EMBEDDED:
        try:
            where = resolve_model(name).path
        except NotFoundError:
            where = f"not fetched (splitserve model fetch {name})"
        write(f"{name}\t{where}\n")


def fetch_with_progress(name: str) -> Path:
    """Fetches with a progress bar on a terminal, else with one line per step."""
    from splitserve.models.fetch import fetch_model

    with _progress(name) as progress:
        return fetch_model(name, progress)


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield _plain(name)
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
