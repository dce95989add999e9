"""`splitserve model`: embedded models on this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.output import shown_progress, write

group = typer.Typer(help="Fetch and list embedded models.", no_args_is_help=True)


@group.command()
def fetch(name: Annotated[str, typer.Argument(help="Name of an embedded model.")]) -> None:
    """Fetch an embedded model into the local cache."""
    write(f"{name} is in {fetch_with_progress(name)}\n")


@group.command("list")
def list_models() -> None:
    """List embedded models and their folders."""
    from splitserve.errors import NotFoundError
    from splitserve.models.sources import EMBEDDED, resolve_model

    for name in EMBEDDED:
        try:
            folder = resolve_model(name).path
        except NotFoundError:
            folder = f"not fetched (splitserve model fetch {name})"
        write(f"{name}\t{folder}\n")


@group.command()
def caches() -> None:
    """Show the folders of fetched models and caches, with their sizes. An uninstall leaves them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from splitserve.models.sources import cache_folder

    for folder in (cache_folder(), Path(HF_HUB_CACHE)):
        size = 0
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):  # another process may be fetching or removing it
                    size += os.lstat(os.path.join(parent, name)).st_size
        write(f"{folder}\t{size / 1e6:.0f} MB\n")


def fetch_with_progress(name: str) -> Path:
    """Fetches with a progress bar on a terminal, else with one line per step."""
    from splitserve.models.fetch import fetch_model

    with shown_progress(name) as progress:
        return fetch_model(name, progress)
