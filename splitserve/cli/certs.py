"""`splitserve certs`: certificates for a cluster under a development authority."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.output import write

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("certs")(certs)


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; made if missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address at which clients reach the coordinator; may be given again."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long certificates are valid.")] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace certificates; the authority is kept.")
    ] = False,
) -> None:
    """Write an authority and a certificate for each role, for `--tls DIR`.

    Give each machine `ca.pem` and the files of the roles that run there, and nobody `ca-key.pem`.
    """
    from splitserve.certificates import write_certificates

    hosts = dict.fromkeys((*LOCAL_HOSTS, socket.gethostname(), *(host or ())))
    for path in write_certificates(directory, list(hosts), days, force=force):
        write(f"{path}\n")
