"""`splitserve certs`: certificates for a cluster under a development authority."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli.output import write

if TYPE_CHECKING:
    from splitserve.security.tls import Role

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
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE/ID",
            help="Worker that gets a certificate of its own, for example decode/decode-0; may be given again.",
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

    workers = [_parse_worker(text) for text in worker or ()]
    hosts = dict.fromkeys((*LOCAL_HOSTS, socket.gethostname(), *(host or ())))
    for path in write_certificates(directory, list(hosts), days, force=force, workers=workers):
        write(f"{path}\n")


def _parse_worker(text: str) -> tuple[Role, str]:
    from splitserve.errors import InvalidArgumentError

    role, _, worker_id = text.partition("/")
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "worker": "worker"}
    if role not in roles or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", worker_id):
        bound = "prefill/ID, decode/ID or worker/ID with an ID of 1..64 characters of [A-Za-z0-9._-]"
        raise InvalidArgumentError(f"worker must be {bound}, not {text!r}", field="worker")
    return roles[role], worker_id
