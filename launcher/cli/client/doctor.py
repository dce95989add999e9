"""`splitserve doctor`: the lanes between the workers of a running cluster, and what to change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import options
from launcher.cli.output import drawn, write, write_json
from launcher.cluster.doctor import (
    HostVerdict,
    PairVerdict,
    host_verdicts,
    is_slow,
    pair_verdicts,
)
from splitserve.host_facts import read_host_facts

if TYPE_CHECKING:
    from splitserve.v1 import inference_pb2

EXIT_SLOW = 1
STYLES = {"ok": "green", "note": "yellow", "slow": "red"}


def doctor(
    target: options.Target = options.DEFAULT_TARGET,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Look at this machine alone, its RDMA set-up included.")
    ] = False,
) -> None:
    """Explain the lanes between workers, and this machine's part in them. Exit code 1 when a pair is slow."""
    from launcher.cluster.rdma_verdicts import rdma_verdicts
    from splitserve.gpus.rdma import read_rdma_facts
    from splitserve.gpus.worker_gpus import GPU_VARIABLE

    info = None if machine else asyncio.run(_ask(target, api_key, tls))
    host = read_host_facts()
    pairs = [] if info is None else pair_verdicts(info.workers, host)
    # In a worker's container the first variable names the worker's own GPUs.
    visible = os.environ.get(GPU_VARIABLE) or os.environ.get("CUDA_VISIBLE_DEVICES")
    facts = [*host_verdicts(host), *rdma_verdicts(read_rdma_facts(), host.variables, visible)]
    if machine and not as_json:
        write(_table("this machine", facts))
    elif as_json:
        write_json({"pairs": [asdict(pair) for pair in pairs], "host": [asdict(fact) for fact in facts]})
    else:
        write(_report(pairs, facts))
    if is_slow(pairs):
        raise typer.Exit(EXIT_SLOW)


async def _ask(target: str, api_key: str | None, tls: Path | None) -> inference_pb2.GetServerInfoResponse:
    async with options.client(target, api_key, tls) as client:
        return await client.server_info()


def _report(pairs: Sequence[PairVerdict], facts: Sequence[HostVerdict]) -> str:
    from rich.markup import escape
    from rich.table import Table

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
    shown = drawn(lanes if pairs else "no pair of a prefill and a decode worker is registered")
    machine = _table("this machine (workers elsewhere may differ)", facts)
    return f"lanes, as measured at first contact\n{shown}\n{machine}"


def _table(heading: str, facts: Sequence[HostVerdict]) -> str:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        text = f"[{STYLES[fact.verdict]}]{fact.verdict}[/]: {escape(fact.text)}"
        table.add_row(fact.subject, _with_advice(text, fact.advice))
    return f"{heading}\n{drawn(table)}"


def _with_advice(text: str, advice: str) -> str:
    return f"{text}\n-> {advice}" if advice else text
