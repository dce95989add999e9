"""Command-line option types shared by several commands. Options of settings: `splitserve.config.command_line`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.simulation.traces.columns import ColumnMap
    from splitserve.client import AsyncClient

Target = Annotated[
    str, typer.Option(envvar="SPLITSERVE_TARGET", metavar="HOST:PORT", help="Address of the coordinator.")
]
DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 120.0
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        envvar="SPLITSERVE_TARGET",
        metavar="HOST:PORT",
        help="Coordinator; give it again, or commas, for each of several. Default: 127.0.0.1:50051.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SPLITSERVE_API_KEY",
        show_envvar=True,
        help="API key of the tenant. Prefer the variable: command lines are visible to other users.",
    ),
]
TlsClient = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        envvar="SPLITSERVE_TLS",
        metavar="DIR|FILE",
        help="Encrypt: folder of `splitserve certs`, or the authority's PEM file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
ClusterTokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Secret that all parts of the cluster share.")
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=NAME,...",
        help="The trace is any CSV or JSONL log with these columns: timestamp, input_length, output_length; unit=ms.",
    ),
]


def addresses(targets: Sequence[str] | None) -> list[str]:
    """The addresses that `--target` names, each option one address or several with commas; by default the local one."""
    return [address for target in targets or [DEFAULT_TARGET] for address in target.split(",")]


def client(
    target: str, api_key: str | None, tls: Path | None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> AsyncClient:
    """A client of the coordinator that the options `--target`, `--api-key` and `--tls` describe. `timeout_s` limits a
    whole generation."""
    from splitserve.client import AsyncClient
    from splitserve.security.tls import client_files

    files = client_files(tls) if tls else None
    return AsyncClient(target, timeout_s=timeout_s, api_key=api_key, tls=files)


def check_above_zero(most: float = math.inf, **given: float | None) -> None:
    """Raises InvalidArgumentError naming the first option that is given and is not above 0 and at most `most`."""
    for name, value in given.items():
        if value is not None and not (0 < value <= most and math.isfinite(value)):
            bound = f"above 0 and at most {most:.0f}" if math.isfinite(most) else "above 0"
            raise InvalidArgumentError(f"{name} must be {bound}, not {value:g}", field=name)


def column_map(text: str | None) -> ColumnMap | None:
    """The columns that `--columns` names; None without the option. Raises InvalidArgumentError."""
    from autoscaler.simulation.traces.columns import ColumnMap

    return None if text is None else ColumnMap.parse(text)
