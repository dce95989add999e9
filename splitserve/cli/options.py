"""Command-line option types shared by several commands. Options of settings: `splitserve.config.command_line`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Option(envvar="SPLITSERVE_TARGET", metavar="HOST:PORT", help="Address of the coordinator.")
]
DEFAULT_TARGET = "127.0.0.1:50051"
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
