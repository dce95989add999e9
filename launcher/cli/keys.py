"""`splitserve keys`: API keys for the file of tenants."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.output import write

group = typer.Typer(help="API keys for the file of tenants.", no_args_is_help=True)


@group.command()
def new() -> None:
    """Print a new key, which is stored nowhere, and the line for the tenant's `key_hashes`."""
    from splitserve.security.api_keys import key_hash, new_key

    key = new_key()
    write(f"key (give it to the tenant; it is not shown again):\n{key}\n")
    write(f'line under `key_hashes` in the file of tenants:\n- "{key_hash(key)}"\n')


@group.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the files; made if missing.", metavar="FOLDER")],
) -> None:
    """Write the secrets that FOLDER lacks: cluster token, API key, file of tenants, Grafana password.

    SPLITSERVE_CLUSTER_TOKEN and SPLITSERVE_API_KEY are taken where they are set. Nothing secret is printed.
    """
    from splitserve.rpc.credentials import TOKEN_VARIABLE
    from splitserve.security.api_keys import API_KEY_VARIABLE, make_key_folder

    token, key = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(API_KEY_VARIABLE, "")
    written = make_key_folder(folder, token=token, key=key)
    write(f"{folder}: wrote {', '.join(written)}\n" if written else f"{folder}: all there\n")
