"""`splitserve routes`: the served models behind a public name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import options
from launcher.cli.output import write, write_json
from splitserve.errors import InvalidArgumentError, SplitserveError

if TYPE_CHECKING:
    from splitserve.client.routes_client import RoutesClient, RouteState, Weights

Name = Annotated[str, typer.Argument(help="The name that clients use.")]


group = typer.Typer(help="Show and change model routes: canaries and rollbacks.", no_args_is_help=True)


@group.command()
def show(
    target: options.Targets = None,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Show the routes in force and the part of new requests that each model gets."""
    results = asyncio.run(_client(target, api_key, tls, cluster_token_file).routes())
    answers = {
        address: routes for address, routes in results.items() if not isinstance(routes, SplitserveError)
    }
    if as_json:
        write_json({address: [_fields(route) for route in routes] for address, routes in answers.items()})
    else:
        for address, routes in answers.items():
            write(f"{address}\n" + "".join(map(_lines, routes)) + ("" if routes else "  no routes\n"))
        weights = [[(route.name, *route.weights.items()) for route in routes] for routes in answers.values()]
        if any(other != weights[0] for other in weights):
            write("the coordinators differ\n")
    _checked(results)


@group.command("set")
def set_route(
    name: Name,
    shares: Annotated[
        list[str], typer.Argument(metavar="MODEL=WEIGHT...", help="Served models and weights.")
    ],
    target: options.Targets = None,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Replace a route at once: `splitserve routes set smollm2 smollm2-v1=95 smollm2-v2=5`."""
    from splitserve.config.coordinator import parse_weights

    try:
        weights = parse_weights([share.rpartition("=")[::2] for share in shares])
    except ValueError as error:
        raise InvalidArgumentError(f"shares are written MODEL=WEIGHT: {error}", field="shares") from None
    _set(_client(target, api_key, tls, cluster_token_file), name, weights)


@group.command()
def rollback(
    name: Name,
    target: options.Targets = None,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Undo the last change of a route; a second time redoes it."""
    client = _client(target, api_key, tls, cluster_token_file)
    _set(client, name, asyncio.run(client.previous(name)))


@group.command()
def remove(
    name: Name,
    target: options.Targets = None,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Remove a route; its served models stay."""
    _set(_client(target, api_key, tls, cluster_token_file), name, {})


def _client(
    targets: list[str] | None, api_key: str | None, tls: Path | None, token_file: Path | None
) -> RoutesClient:
    from splitserve.client.routes_client import RoutesClient
    from splitserve.rpc.credentials import read_token
    from splitserve.security.tls import client_files

    files = client_files(tls) if tls else None
    token = read_token(token_file)
    return RoutesClient(options.addresses(targets), api_key=api_key, tls=files, token=token)


def _set(client: RoutesClient, name: str, weights: Weights) -> None:
    results = asyncio.run(client.set(name, weights))
    for address, unknown in results.items():
        if not isinstance(unknown, SplitserveError):
            note = f" (no worker serves {', '.join(unknown)} yet)" if unknown else ""
            write(f"{address}: {name} -> {_shown(weights) or 'removed'}{note}\n")
    _checked(results)


def _checked(results: Mapping[str, object]) -> None:
    """Raises the first error among the results, naming its coordinator."""
    for address, result in results.items():
        if isinstance(result, SplitserveError):
            raise type(result)(f"{address}: {result.message}", reason=result.reason, field=result.field)


def _lines(route: RouteState) -> str:
    before = "" if route.previous is None else f"  (before: {_shown(route.previous) or 'none'})"
    text = f"  {route.name}{before}\n"
    for model, weight in route.weights.items():
        note = "" if model in route.ready_models else ", no ready workers"
        text += f"    {model}  weight {weight:g}, {route.share(model):.1%} of new requests{note}\n"
    return text


def _shown(weights: Weights) -> str:
    return " ".join(f"{model}={weight:g}" for model, weight in weights.items())


def _fields(route: RouteState) -> dict[str, object]:
    return {
        "name": route.name,
        "weights": dict(route.weights),
        "previous": None if route.previous is None else dict(route.previous),
        "shares": {model: route.share(model) for model in route.weights},
        "ready_models": sorted(route.ready_models),
    }
