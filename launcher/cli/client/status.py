"""`splitserve status`: the pools as the coordinator sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli import options
from launcher.cli.output import STATE_STYLES, drawn, write, write_json
from splitserve.rpc.documents import document

if TYPE_CHECKING:
    from splitserve.v1 import inference_pb2


def status(
    target: options.Target = options.DEFAULT_TARGET,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Show workers and models of a running cluster."""
    info, models = asyncio.run(_ask(target, api_key, tls))
    if as_json:
        write_json(document(info) | {"models": [document(model) for model in models]})
    else:
        write(_table(target, info, models))


async def _ask(
    target: str, api_key: str | None, tls: Path | None
) -> tuple[inference_pb2.GetServerInfoResponse, list[inference_pb2.ModelInfo]]:
    async with options.client(target, api_key, tls) as client:
        return await client.server_info(), await client.models()


def _start(worker: inference_pb2.WorkerInfo) -> str:
    """The phases of a worker's start, "1.9+0.8+0.4 s": process and code, weights, warm-up."""
    if not worker.HasField("start"):
        return ""
    start = worker.start
    phases = start.process_seconds, start.weights_seconds, start.warm_up_seconds
    return f"{'+'.join(f'{seconds:.1f}' for seconds in phases)} s"


def _state(worker: inference_pb2.WorkerInfo) -> str:
    if not worker.HasField("preempted_in_seconds"):
        return worker.state
    return f"{worker.state}, machine ends in {worker.preempted_in_seconds:.0f} s"


def _table(
    target: str, info: inference_pb2.GetServerInfoResponse, models: list[inference_pb2.ModelInfo]
) -> str:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "role", "state", "address"):
        table.add_column(heading, no_wrap=True)
    table.add_column("model", overflow="fold")
    for heading in ("running", "waiting", "KV free/total", "reserved", "quarantined", "start"):
        table.add_column(heading, justify="right", overflow="fold")
    for worker in info.workers:
        table.add_row(
            worker.worker_id,
            worker.role,
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
    return f"{heading}\n{drawn(table if info.workers else 'no workers registered')}"
