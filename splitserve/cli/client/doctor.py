"""`splitserve doctor`: the lanes between the workers of a running cluster, and what to change."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli import options
from splitserve.cli.output import write

if TYPE_CHECKING:
    from splitserve.cluster.doctor import HostVerdict, PairVerdict
    from splitserve.v1 import inference_pb2

PIPED_WIDTH = 200
EXIT_SLOW = 1
STYLES = {"ok": "green", "note": "yellow", "slow": "red"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    target: options.Target = options.DEFAULT_TARGET,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    device: Annotated[
        bool, typer.Option("--device", help="Test this machine's CUDA devices, or its cpu, and no cluster.")
    ] = False,
    machine: Annotated[
        bool, typer.Option("--machine", help="Look at this machine alone, its RDMA set-up included.")
    ] = False,
) -> None:
    """Explain the lanes between workers, and this machine's part in them. Exit code 1 when a pair is slow."""
    if device:
        _test_devices(as_json=as_json)
        return
    from splitserve.cluster.doctor import host_verdicts, is_slow, pair_verdicts
    from splitserve.cluster.rdma_verdicts import rdma_verdicts
    from splitserve.gpus.engine_command import GPU_VARIABLE
    from splitserve.gpus.rdma import read_rdma_facts
    from splitserve.host_facts import read_host_facts

    info = None if machine else asyncio.run(_ask(target, api_key, tls))
    host = read_host_facts()
    pairs = [] if info is None else pair_verdicts(info.workers, host)
    # In a worker's container the first one names its own GPUs.
    visible = os.environ.get(GPU_VARIABLE) or os.environ.get("CUDA_VISIBLE_DEVICES")
    facts = [*host_verdicts(host), *rdma_verdicts(read_rdma_facts(), host.variables, visible)]
    if machine and not as_json:
        write(_table("this machine", facts))
    elif as_json:
        document = {"pairs": [asdict(pair) for pair in pairs], "host": [asdict(fact) for fact in facts]}
        write(json.dumps(document, ensure_ascii=False) + "\n")
    else:
        write(_report(pairs, facts))
    if is_slow(pairs):
        raise typer.Exit(EXIT_SLOW)


def _test_devices(*, as_json: bool) -> None:
    """Exit code 1 when a check fails."""
    from splitserve.cli.client.device_doctor import all_devices, self_test_of
    from splitserve.cluster.device_verdicts import is_broken

    found = dict(self_test_of(device) for device in all_devices())
    if as_json:
        document = {name: [asdict(verdict) for verdict in verdicts] for name, verdicts in found.items()}
        write(json.dumps({"devices": document}, ensure_ascii=False) + "\n")
    else:
        write("\n".join(_table(name, verdicts) for name, verdicts in found.items()))
    if any(is_broken(verdicts) for verdicts in found.values()):
        raise typer.Exit(EXIT_SLOW)


async def _ask(target: str, api_key: str | None, tls: Path | None) -> inference_pb2.GetServerInfoResponse:
    from splitserve.client import AsyncClient
    from splitserve.security.tls import client_files

    files = client_files(tls) if tls else None
    async with AsyncClient(target, api_key=api_key, tls=files) as client:
        return await client.server_info()


def _report(pairs: Sequence[PairVerdict], facts: Sequence[HostVerdict]) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    lanes = Table(box=None, pad_edge=False)
    for heading in ("prefill", "decode", "lane"):
        lanes.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "latency ms"):
        lanes.add_column(heading, justify="right")
    lanes.add_column("verdict", overflow="fold")
    for pair in pairs:
        verdict = f"[{STYLES[pair.verdict]}]{pair.verdict}[/]: {escape(pair.text)}"
        numbers = (f"{pair.gb_per_second:.2f}", f"{pair.latency_ms:.3f}")
        lanes.add_row(pair.prefill, pair.decode, pair.lane, *numbers, _with_advice(verdict, pair.advice))
    with console.capture() as capture:
        console.print("lanes, as measured at first contact", highlight=False)
        console.print(lanes if pairs else "no pair of a prefill and a decode worker is registered")
    return capture.get() + "\n" + _table("this machine (workers elsewhere may differ)", facts)


def _table(heading: str, facts: Sequence[HostVerdict]) -> str:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        shown = "failed" if fact.verdict == "slow" else fact.verdict
        text = f"[{STYLES[fact.verdict]}]{shown}[/]: {escape(fact.text)}"
        table.add_row(fact.subject, _with_advice(text, fact.advice))
    with console.capture() as capture:
        console.print(heading, highlight=False, markup=False)
        console.print(table)
    return capture.get()


def _with_advice(text: str, advice: str) -> str:
    return f"{text}\n-> {advice}" if advice else text
