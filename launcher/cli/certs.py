"""`splitserve certs`: certificates for a cluster under a development authority."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.output import write

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; made if missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address at which clients reach the coordinator; may be given again."),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Worker that gets a certificate of its own, for example decode-0; may be given again.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long certificates are valid.")] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace certificates; the authority is kept.")
    ] = False,
) -> None:
    """Write an authority and a certificate for each role, for `--tls DIR`.

    Give each machine `ca.pem` and the files of the roles that run there, and nobody `ca-key.pem`.
    """
    from splitserve.security.certificates import write_certificates

    workers = [_checked_id(worker_id) for worker_id in worker or ()]
    hosts = dict.fromkeys((*LOCAL_HOSTS, socket.gethostname(), *(host or ())))
    for path in write_certificates(directory, list(hosts), days, force=force, workers=workers):
        write(f"{path}\n")


def _checked_id(worker_id: str) -> str:
    from splitserve.errors import InvalidArgumentError

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", worker_id):
        message = f"worker must be an id of 1..64 characters of [A-Za-z0-9._-], not {worker_id!r}"
        raise InvalidArgumentError(message, field="worker")
    return worker_id
