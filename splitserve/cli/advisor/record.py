"""`splitserve record`: the traffic of a running cluster into a file, without its content."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from splitserve.cli import options
from splitserve.cli.client.explain import Targets, addresses
from splitserve.cli.output import shown_progress, write
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.runtime.first_answer import first_answer

if TYPE_CHECKING:
    from splitserve.cli.advisor.recording_file import RecordingFile
    from splitserve.client.traffic_client import RecordingPlan, RecordingTally
    from splitserve.rpc.credentials import ClusterCredentials
    from splitserve.v1 import scaling_pb2

T = TypeVar("T")
SALT_BYTES = 32
MAX_TARGETS = 64
EVERY_S = 0.5
DRAIN_S = 30.0
WORKERS_S = 30.0
"""How long all coordinators together may take to tell of the workers at the end, without which no engine model can be
fitted."""

Seconds = Annotated[
    float,
    typer.Option(
        min=0.1, max=86_400, metavar="SECONDS", help="Record the requests that arrive for this long."
    ),
]
OutFile = Annotated[Path, typer.Option(metavar="FILE", help="Where to: JSON lines, a request each.")]
Drain = Annotated[
    float,
    typer.Option(
        min=0, max=3600, metavar="SECONDS", help="How long requests in progress may then take to end."
    ),
]
Model = Annotated[str, typer.Option(help="Only requests for this served model. Default: all.")]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("record")(record)


@dataclass(frozen=True, slots=True)
class RecordingAccess:
    """How the coordinators are reached."""

    targets: Sequence[str]
    security: ClusterCredentials
    api_key: str | None

    @classmethod
    def of(
        cls, target: Sequence[str] | None, api_key: str | None, tls: Path | None, token_file: Path | None
    ) -> RecordingAccess:
        """From the options of a command. Raises InvalidArgumentError, ConfigError."""
        from splitserve.rpc.credentials import ClusterCredentials, read_token
        from splitserve.security.tls import client_files

        targets = addresses(target)
        if len(targets) > MAX_TARGETS:
            raise InvalidArgumentError(f"target: at most {MAX_TARGETS} coordinators", field="target")
        security = ClusterCredentials(client_files(tls) if tls else None, read_token(token_file))
        return cls(targets, security, api_key)


def record(
    out: OutFile,
    seconds: Seconds = 60.0,
    drain: Drain = DRAIN_S,
    model: Model = "",
    force: Force = False,
    target: Targets = None,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Record the traffic of a running cluster: lengths, times, prefix hashes; no content."""
    access = RecordingAccess.of(target, api_key, tls, cluster_token_file)
    found = record_to(out, access, seconds, drain, model, force=force)
    write(f"{json.dumps(found)}\n" if as_json else f"{_told(found)}\n")


def record_to(
    out: Path,
    access: RecordingAccess,
    seconds: float,
    drain_s: float = DRAIN_S,
    model: str = "",
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Records into a file; what `--json` prints. Raises SplitserveError."""
    from splitserve.cli.advisor.recording_file import RecordingFile
    from splitserve.client.traffic_client import RecordingPlan

    plan = RecordingPlan(secrets.token_bytes(SALT_BYTES), seconds, drain_s, model)
    with RecordingFile(out, seconds, force=force) as file:
        tallies = asyncio.run(_record(access, plan, file))
    return summary(out, tallies)


async def _record(
    access: RecordingAccess, plan: RecordingPlan, file: RecordingFile
) -> dict[str, RecordingTally]:
    from splitserve.client.traffic_client import TrafficClient

    clients = [TrafficClient(one, security=access.security, api_key=access.api_key) for one in access.targets]
    began = time.monotonic()
    with shown_progress("record", lines=False) as progress:
        recordings = [asyncio.create_task(client.record(plan, file.add)) for client in clients]
        try:
            pending = set(recordings)
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=EVERY_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                number = sum(client.tally.recorded for client in clients)
                progress(f"{number} requests", min(1.0, (time.monotonic() - began) / plan.seconds))
        finally:
            for task in recordings:
                task.cancel()
            await asyncio.gather(*recordings, return_exceptions=True)
    file.end(await _workers(access, plan.model))
    return {client.target: client.tally for client in clients}


async def _workers(access: RecordingAccess, model: str) -> Sequence[scaling_pb2.WorkerSignals]:
    """The workers as the coordinator sees them that is the first to tell of any; none if none does in time."""

    async def told(target: str) -> list[scaling_pb2.WorkerSignals]:
        from splitserve.client.scaling_client import ScalingClient

        async with ScalingClient(
            target, WORKERS_S, security=access.security, api_key=access.api_key
        ) as client:
            signals = await client.signals(model)
        return [worker for served in signals.models for worker in served.workers]

    return await first_told([told(one) for one in access.targets], WORKERS_S)


async def first_told(asked: Iterable[Coroutine[Any, Any, Sequence[T]]], deadline_s: float) -> Sequence[T]:
    """What is not empty of those that are all asked at once, as soon as one has it; nothing after `deadline_s` seconds.
    One that fails with a SplitserveError has nothing."""

    async def told(one: Coroutine[Any, Any, Sequence[T]]) -> Sequence[T]:
        with suppress(SplitserveError):
            return await one
        return ()

    return await first_answer(map(told, asked), deadline_s) or ()


def summary(out: Path, tallies: dict[str, RecordingTally]) -> dict[str, Any]:
    """What `--json` prints."""
    each = {
        target: {
            "recorded": tally.recorded,
            "lost": tally.lost,
            "unfinished": tally.running,
            "breaks": tally.breaks,
            "restarts": tally.restarts,
        }
        for target, tally in tallies.items()
    }
    return {
        "file": str(out),
        "recorded": sum(one["recorded"] for one in each.values()),
        "lost": sum(one["lost"] for one in each.values()),
        "unfinished": sum(one["unfinished"] for one in each.values()),
        "coordinators": each,
    }


def _told(found: dict[str, Any]) -> str:
    lines = [f"{found['file']}: {found['recorded']} requests"]
    for target, one in found["coordinators"].items():
        problems = [
            f"{one[key]} {what}"
            for key, what in (
                ("lost", "lost while this reader was too slow or away"),
                ("unfinished", "had not ended"),
                ("restarts", "restarts: what was in progress then is not known"),
            )
            if one[key]
        ]
        lines += [f"  {target}: {problem}" for problem in problems]
    return "\n".join(lines)
