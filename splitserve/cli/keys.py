"""`splitserve keys`: API keys for the file of tenants."""

from __future__ import annotations

import typer

from splitserve.cli.output import write


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    keys = typer.Typer(help="API keys for the file of tenants.", no_args_is_help=True)
    keys.command("new")(new)
    app.add_typer(keys, name="keys")


def new() -> None:
    """Print a new key, which is stored nowhere, and the line for the tenant's `key_hashes`."""
    from splitserve.api_keys import key_hash, new_key

    key = new_key()
    write(f"key (give it to the tenant; it is not shown again):\n{key}\n")
    write(f'line under `key_hashes` in the file of tenants:\n- "{key_hash(key)}"\n')
