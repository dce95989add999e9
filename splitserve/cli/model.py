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
    from splitserve.models import Progress


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
    """List embedded models and where they lie."""
    from splitserve.errors import NotFoundError
    from splitserve.models import EMBEDDED, resolve_model

    for name in EMBEDDED:
        try:
            where = resolve_model(name).path
        except NotFoundError:
            where = f"not fetched (splitserve model fetch {name})"
        write(f"{name}\t{where}\n")


def fetch_with_progress(name: str) -> Path:
    """Fetches with a bar on a terminal, with one line for each step otherwise."""
    from splitserve.model_fetch import fetch_model

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
    told: set[str] = set()

    def progress(what: str, fraction: float) -> None:
        # The words of a step may hold changing numbers; a log wants the step once.
        step = what.split(" ", 1)[0]
        if step not in told:
            told.add(step)
            print(f"{name}: {what}", file=sys.stderr, flush=True)

    return progress
