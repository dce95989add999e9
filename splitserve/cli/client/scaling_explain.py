"""`splitserve autoscaler explain`: the last scaling decisions, why, what else would have come of it, and what came."""

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

from splitserve.cli import options
from splitserve.cli.output import write
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
Model = Annotated[str | None, typer.Option("--model", help="Only this one, where several share a budget.")]
Last = Annotated[int, typer.Option("--last", min=1, max=240, help="Decisions to show, the latest first.")]


def explain_scaling(
    target: Endpoint,
    last: Last = 5,
    model: Model = None,
    as_json: options.AsJson = False,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Show the last scaling decisions: why, what one replica more or less would do, and what came of it."""
    from splitserve.rpc.credentials import read_token

    page = _fetched(target, tls, read_token(cluster_token_file))
    mine = [one for one in page["decisions"] if model in (None, one.get("model"))]
    page["decisions"] = mine[:last]
    page["replays"] = [one for one in page["replays"] if model in (None, one.get("model"))]
    if as_json:
        write(f"{json.dumps(page)}\n")
        return
    lines = [
        *_shared_lines(page.get("shared")),
        *_lines(page["decisions"]),
        *_replay_lines(page["replays"]),
    ]
    write("".join(f"{line}\n" for line in lines))


def _fetched(target: str, tls: Path | None, token: str | None) -> dict[str, Any]:
    """The page. Raises UnavailableError, UnauthenticatedError, NotFoundError and InvalidArgumentError."""
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
    if (
        answer.status != HTTPStatus.OK
        or not isinstance(page, dict)
        or not page.keys() >= {"decisions", "replays"}
    ):
        raise NotFoundError(f"{target}: not an autoscaler's metrics endpoint", reason="NO_AUTOSCALER")
    return page


def _context(tls: Path) -> ssl.SSLContext:
    from splitserve.security.tls import client_files

    files = client_files(tls)
    context = ssl.create_default_context(cafile=files.authority)
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _shared_lines(shared: Mapping[str, Any] | None) -> Iterator[str]:
    """What several models share, and who has it."""
    for name, limit in (shared or {"limits": {}})["limits"].items():
        used = {model: uses.get(name, 0.0) for model, uses in (shared or {})["used"].items()}
        who = ", ".join(f"{model} {amount:g}" for model, amount in used.items()).replace(" ", " has ", 1)
        yield f"all models together: {sum(used.values()):g} of {limit:g} {name} ({who})"


def _lines(decisions: list[Mapping[str, Any]]) -> Iterator[str]:
    """Plain text, the same piped and on a terminal."""
    if not decisions:
        yield "no decision yet"
    for number, decision in enumerate(decisions):
        if number:
            yield ""
        notes = "" if decision["acted"] else "  (not acted on)"
        notes += "" if decision["complete"] else "  (a coordinator was silent)"
        of_model = f" for {decision['model']}" if "model" in decision else ""
        title = _bold(f"decision {decision['number']}{of_model}")
        yield f"{title}  {decision['time']}{notes}"
        for name, pool in decision["pools"].items():
            yield from _pool_lines(name, pool, decision["window_s"])


def _pool_lines(name: str, pool: Mapping[str, Any], window_s: float) -> Iterator[str]:
    standby = f" + {pool['standby']} standby" if pool["standby"] else ""
    starting = f" + {pool['starting']} starting" if pool["starting"] else ""
    yield f"  {name}: {pool['ready']} ready{starting}, wants {pool['desired']}{standby}"
    yield f"    bound by {pool['cause']}: {pool['reason']}"
    inputs = ", ".join(f"{key} {_figure(value)}" for key, value in pool["inputs"].items())
    yield f"    inputs: {inputs}"
    if pool["actions"]:
        yield f"    actions: {', '.join(pool['actions'])}"
    units = " units" if pool.get("bill") else ""
    yield from _bill_lines(pool.get("bill"))
    if pool["target_s"] is None:
        yield "    no latency target: nothing to predict"
        return
    shares = [pool["fewer"], pool["planned"], pool["more"]]
    told = ", ".join(f"{_share(one['attainment'])} with {one['replicas']}{units}" for one in shares if one)
    yield f"    predicted within {pool['target_s'] * 1e3:g} ms: {told}"
    came = pool["achieved"]
    if came is None:
        yield f"    achieved: not known before {window_s:g} s after it"
    else:
        about = f"{came['samples']} samples, {came['ready']} ready, {came['after_s']:.0f} s after it"
        yield f"    achieved: {_share(came['attainment'])} ({about})"


def _bill_lines(bill: Mapping[str, Any] | None) -> Iterator[str]:
    """Money for an hour; a unit is a replica of speed 1. An autoscaler of an earlier version says nothing of it."""
    if not bill:
        return
    parts = [
        f"{one['wanted']} {one['name']} at {one['price_per_hour']:g}{_on_spot(one)}{_resting(one)} (of {one['there']})"
        for one in bill["classes"]
    ]
    yield f"    bill: {bill['wanted_per_hour']:.4g} an hour: {' + '.join(parts)}; now {bill['there_per_hour']:.4g}"
    less = bill["wanted_per_hour"] - bill["fewer_per_hour"]
    more = bill["more_per_hour"] - bill["wanted_per_hour"]
    if bill.get("wanted_gpus") or bill.get("there_gpus"):
        each = ", ".join(f"{one['name']} {one['gpus']}" for one in bill["classes"])
        yield f"    GPUs: {bill['wanted_gpus']} wanted, now {bill['there_gpus']} ({each} a replica)"
    yield f"    one unit more costs {more:.4g} an hour, one less saves {less:.4g}"


def _on_spot(one: Mapping[str, Any]) -> str:
    return " on spot machines" if one.get("spot") else ""


def _resting(one: Mapping[str, Any]) -> str:
    return f" + {one['standby']} on standby" if one.get("standby") else ""


def _replay_lines(replays: list[Mapping[str, Any]]) -> Iterator[str]:
    for number, one in enumerate(replays):
        model = one.get("model")
        if number == 0 or model != replays[number - 1].get("model"):
            yield ""
            about = f"{one['requests']} requests of {one['length_s']:g} s, replayed from the same start"
            about += "" if model is None else ", with what the others leave of what is shared"
            of_model = "" if model is None else f" for {model}"
            yield f"{_bold(f'had these policies decided{of_model}')}  ({about})"
        name = one["policy"] if one["role"] == "shadow" else f"{one['policy']} (in force)"
        hours = f"{one['replica_hours']:.3g} replica-hours, {one['gpu_hours']:.3g} GPU-hours"
        yield f"  {name}: {_share(one['attainment'])} within both targets, {hours}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text
