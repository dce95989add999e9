"""`splitserve status`: the pools as the coordinator sees them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from splitserve.cli import options
from splitserve.cli.output import write

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from splitserve.v1 import inference_pb2

PIPED_WIDTH = 200
STATE_STYLES = {
    "ready": "green",
    "connecting": "yellow",
    "draining": "magenta",
    "standby": "cyan",
    "sleeping": "blue",
    "slow-lane": "red",
    "circuit-open": "red",
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(status)


def status(
    target: options.Target = options.DEFAULT_TARGET,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Show workers and models of a running cluster."""
    info, models = asyncio.run(_ask(target, api_key, tls))
    if as_json:
        _print_json(info, models)
    else:
        write(_table(target, info, models))


async def _ask(
    target: str, api_key: str | None, tls: Path | None
) -> tuple[inference_pb2.GetServerInfoResponse, list[inference_pb2.ModelInfo]]:
    from splitserve.client import AsyncClient
    from splitserve.security.tls import client_files

    files = client_files(tls) if tls else None
    async with AsyncClient(target, api_key=api_key, tls=files) as client:
        return await client.server_info(), await client.models()


def _print_json(info: inference_pb2.GetServerInfoResponse, models: list[inference_pb2.ModelInfo]) -> None:
    document = _fields(info)
    document["workers"] = [
        _fields(worker) | {"lanes": [_fields(lane) for lane in worker.lanes], "start": _fields(worker.start)}
        for worker in info.workers
    ]
    document["models"] = [
        _fields(model) | {"versions": [_fields(version) for version in model.versions]} for model in models
    ]
    write(json.dumps(document, ensure_ascii=False) + "\n")


def _fields(message: Message) -> dict[str, Any]:
    # protobuf's JSON prints 64-bit numbers as strings.
    fields = message.DESCRIPTOR.fields
    unset = {one.name for one in fields if one.has_presence and not message.HasField(one.name)}
    return {one.name: None if one.name in unset else getattr(message, one.name) for one in fields}


def _start(worker: inference_pb2.WorkerInfo) -> str:
    """The phases of a worker's start, "1.9+0.8+0.4 s": process and code, weights, warm-up; then its last waking."""
    if not worker.HasField("start"):
        return ""
    start = worker.start
    phases = start.process_seconds, start.weights_seconds, start.warm_up_seconds
    woke = f", woke in {worker.wake_seconds:.1f} s" if worker.HasField("wake_seconds") else ""
    source = f", weights from {start.weights_from}" if start.weights_from == "peer" else ""
    return f"{'+'.join(f'{seconds:.1f}' for seconds in phases)} s{source}{woke}"


def _state(worker: inference_pb2.WorkerInfo) -> str:
    if not worker.HasField("preempted_in_seconds"):
        return worker.state
    return f"{worker.state}, machine ends in {worker.preempted_in_seconds:.0f} s"


def _table(
    target: str, info: inference_pb2.GetServerInfoResponse, models: list[inference_pb2.ModelInfo]
) -> str:
    from rich.console import Console
    from rich.table import Table

    # Piped output has no width; programs could not parse a table folded to 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "pool", "state", "address"):
        table.add_column(heading, no_wrap=True)
    table.add_column("model", overflow="fold")
    for heading in ("running", "waiting", "KV free/total", "reserved", "quarantined", "start"):
        table.add_column(heading, justify="right", overflow="fold")
    for worker in info.workers:
        table.add_row(
            worker.worker_id,
            f"leans to {worker.pool}" if worker.neutral else worker.pool,
            f"[{STATE_STYLES.get(worker.state, 'default')}]{_state(worker)}[/]",
            worker.address,
            f"{worker.model} (experimental CUDA path)" if worker.experimental else worker.model,
            str(worker.running_requests),
            str(worker.waiting_requests),
            f"{worker.free_blocks}/{worker.total_blocks}",
            str(worker.reserved_blocks),
            str(worker.quarantined_blocks),
            _start(worker),
        )
    names = ", ".join(f"{model.name} ({'ready' if model.ready else 'not ready'})" for model in models)
    heading = (
        f"splitserve {info.version} on {target}: up {info.uptime_seconds:.0f} s, "
        f"{info.running_requests} running, models: {names or 'none'}"
    )
    with console.capture() as capture:
        console.print(heading, soft_wrap=True, highlight=False, markup=False)
        console.print(table if info.workers else "no workers registered")
    return capture.get()
