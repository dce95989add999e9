"""`splitserve autoscaler explain`: the last scaling decisions, and why."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.cli import options
from launcher.cli.output import write, write_json
from splitserve.errors import InvalidArgumentError, NotFoundError, UnauthenticatedError, UnavailableError

ANSWER_S = 30.0
MOST_BYTES = 2**25
PATH = "/decisions"

Endpoint = Annotated[
    str,
    typer.Option(
        envvar="SPLITSERVE_AUTOSCALER",
        metavar="HOST:PORT",
        help="The autoscaler's metrics endpoint: its --host and --metrics-port.",
    ),
]
Last = Annotated[int, typer.Option("--last", min=1, max=240, help="Decisions to show, the latest first.")]


def explain_scaling(
    target: Endpoint,
    last: Last = 5,
    as_json: options.AsJson = False,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Show the last scaling decisions: the reason, the signals and the actions."""
    from splitserve.rpc.credentials import read_token

    page = _fetched(target, tls, read_token(cluster_token_file))
    page["decisions"] = page["decisions"][:last]
    if as_json:
        write_json(page)
        return
    write("".join(f"{line}\n" for line in _lines(page["decisions"])))


def _fetched(target: str, tls: Path | None, token: str | None) -> dict[str, Any]:
    """The autoscaler's page of decisions. Raises UnavailableError without an answer, UnauthenticatedError without the
    cluster token, NotFoundError for another service's answer, InvalidArgumentError for a malformed `target`."""
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgumentError(f"target must be HOST:PORT, not {target!r}", field="target")
    context = _context(tls) if tls is not None else None
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)
    try:
        connection.connect()
        if context is not None:
            from splitserve.security.tls import role_name

            connection.sock = context.wrap_socket(connection.sock, server_hostname=role_name("autoscaler"))
        connection.request("GET", PATH, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        body = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        message = f"{target}: no answer of an autoscaler ({error}); it needs --metrics-port"
        raise UnavailableError(message, reason="NO_AUTOSCALER") from None
    finally:
        connection.close()
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise UnauthenticatedError(f"{target}: the cluster token is needed (--cluster-token-file)")
    try:
        page = json.loads(body)
    except ValueError:
        page = None
    if answer.status != HTTPStatus.OK or not isinstance(page, dict) or "decisions" not in page:
        raise NotFoundError(f"{target}: not an autoscaler's metrics endpoint", reason="NO_AUTOSCALER")
    return page


def _context(tls: Path) -> ssl.SSLContext:
    from splitserve.security.tls import client_files

    files = client_files(tls)
    context = ssl.create_default_context(cafile=files.authority)
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _lines(decisions: list[Mapping[str, Any]]) -> Iterator[str]:
    """Plain text, the same piped and on a terminal."""
    if not decisions:
        yield "no decision yet"
    bold, plain = (
        ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    )
    for number, decision in enumerate(decisions):
        if number:
            yield ""
        notes = "" if decision["acted"] else "  (not acted on)"
        notes += "" if decision["complete"] else "  (a coordinator was silent)"
        yield f"{bold}decision {decision['number']}{plain}  {decision['time']}{notes}"
        for name, pool in decision["pools"].items():
            yield from _pool_lines(name, pool)


def _pool_lines(name: str, pool: Mapping[str, Any]) -> Iterator[str]:
    standby = f" + {pool['standby']} standby" if pool["standby"] else ""
    starting = f" + {pool['starting']} starting" if pool["starting"] else ""
    yield f"  {name}: {pool['ready']} ready{starting}, wants {pool['desired']}{standby}"
    yield f"    bound by {pool['cause']}: {pool['reason']}"
    inputs = (
        f"{signal} {'unknown' if value is None else f'{value:.4g}'}"
        for signal, value in pool["inputs"].items()
    )
    yield f"    inputs: {', '.join(inputs)}"
    if pool["next_actions"]:
        yield f"    actions: {', '.join(pool['next_actions'])}"
