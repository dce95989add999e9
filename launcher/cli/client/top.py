"""`splitserve top`: pools, rates, latencies and slow requests of a running cluster, again and again."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import options
from launcher.cli.client.top_figures import LatencyTargets, Reading, figures
from launcher.cli.output import STATE_STYLES, drawn, write, write_json
from splitserve.errors import SplitserveError
from splitserve.rpc.documents import document

if TYPE_CHECKING:
    from rich.console import RenderableType

    from launcher.cli.client.top_figures import LatencyFigures, ModelFigures, WorkerFigures
    from splitserve.client import AsyncClient
    from splitserve.client.scaling_client import ScalingClient
    from splitserve.v1 import records_pb2

    Interval = tuple[list[ModelFigures], list[records_pb2.RequestSummary]]

MAX_TARGETS = 64
SLOW_REQUESTS = 5
PIPED_WIDTH = 120
"""Columns of a picture that goes to a file or a pipe."""

IntervalS = Annotated[
    float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two readings.")
]
Count = Annotated[
    int | None, typer.Option(min=1, help="End after so many pictures. Default: on a terminal none, piped 1.")
]
Ttft = Annotated[
    float,
    typer.Option("--ttft", min=0, max=3600, metavar="SECONDS", help="Target whose attainment is shown."),
]
Tpot = Annotated[
    float,
    typer.Option("--tpot", min=0, max=3600, metavar="SECONDS", help="Target whose attainment is shown."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line and reading instead.")]


def top(
    interval: IntervalS = 2.0,
    count: Count = None,
    ttft: Ttft = 1.0,
    tpot: Tpot = 0.1,
    target: options.Targets = None,
    as_json: AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Watch a running cluster: pools, rates, latencies, slow requests. Ends with Ctrl-C."""
    on_terminal = sys.stdout.isatty() and not as_json
    if count is None and not sys.stdout.isatty():
        count = 1
    watch = _Watch(
        options.addresses(target)[:MAX_TARGETS], interval, LatencyTargets(ttft, tpot), api_key, tls
    )
    try:
        asyncio.run(_live(watch, count) if on_terminal else _printed(watch, count, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@dataclass(slots=True)
class _Watch:
    """Asks the coordinators every `interval_s` seconds."""

    addresses: Sequence[str]
    """Of the coordinators."""
    interval_s: float
    latency_targets: LatencyTargets
    api_key: str | None
    tls: Path | None
    missing: Sequence[str] = ()
    """Addresses of the coordinators that did not answer the last reading."""
    _scaling: list[ScalingClient] = field(default_factory=list)
    _clients: list[AsyncClient] = field(default_factory=list)

    async def intervals(self, count: int | None) -> AsyncIterator[Interval]:
        """The figures of each of the next `count` intervals, and the slowest of the latest slow requests. Without a
        count it never ends."""
        from splitserve.client.scaling_client import ScalingClient
        from splitserve.rpc.credentials import ClusterCredentials
        from splitserve.security.tls import client_files

        security = ClusterCredentials(client_files(self.tls) if self.tls else None)
        async with AsyncExitStack() as stack:
            for address in self.addresses:
                scaling = ScalingClient(address, security=security, api_key=self.api_key)
                self._scaling.append(await stack.enter_async_context(scaling))
                client = options.client(address, self.api_key, self.tls)
                self._clients.append(await stack.enter_async_context(client))
            before = await self._read()
            for _ in itertools.count() if count is None else range(count):
                await asyncio.sleep(self.interval_s)
                now = await self._read()
                yield figures(before, now, self.latency_targets), await self._slow()
                before = now

    async def _read(self) -> Reading:
        """The signals of the coordinators that answer. Raises the first error if none does."""
        answers = await asyncio.gather(
            *(client.signals() for client in self._scaling), return_exceptions=True
        )
        signals, errors = [], {}
        for address, answer in zip(self.addresses, answers, strict=True):
            if isinstance(answer, SplitserveError):
                errors[address] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                signals.append(answer)
        if not signals:
            raise next(iter(errors.values()))
        self.missing = list(errors)
        return Reading(time.monotonic(), signals)

    async def _slow(self) -> list[records_pb2.RequestSummary]:
        answers = await asyncio.gather(
            *(client.request_records(slow=True, limit=SLOW_REQUESTS) for client in self._clients),
            return_exceptions=True,
        )
        records = [record for answer in answers if not isinstance(answer, BaseException) for record in answer]
        return sorted(records, key=lambda record: record.total_ms, reverse=True)[:SLOW_REQUESTS]


async def _printed(watch: _Watch, count: int | None, *, as_json: bool) -> None:
    async for models, slow in watch.intervals(count):
        if as_json:
            answer = {
                "models": [asdict(model) for model in models],
                "slow_requests": [document(record) for record in slow],
                "missing": list(watch.missing),
            }
            write_json(answer)
        else:
            write(drawn(_picture(watch.missing, models, slow), piped_width=PIPED_WIDTH))


async def _live(watch: _Watch, count: int | None) -> None:
    from rich.live import Live

    with Live(f"measuring for {watch.interval_s:g} s", auto_refresh=False) as live:
        async for models, slow in watch.intervals(count):
            live.update(_picture(watch.missing, models, slow), refresh=True)


def _picture(
    missing: Sequence[str], models: Sequence[ModelFigures], slow: Sequence[records_pb2.RequestSummary]
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for model in models:
        parts += [Text(line) for line in _head(model)]
        table = Table(box=None, pad_edge=False)
        for heading in ("worker", "role", "state"):
            table.add_column(heading, no_wrap=True)
        for heading in ("running", "waiting", "tokens to compute", "KV used", "tokens/s", "step ms"):
            table.add_column(heading, justify="right")
        for worker in model.workers:
            table.add_row(*_row(worker))
        parts += [table, Text()]
    if not models:
        parts.append(Text("no worker has registered"))
    if slow:
        parts.append(Text("slow requests (splitserve explain ID)"))
    for record in slow:
        first = f"TTFT {record.ttft_ms:.0f} ms, " if record.HasField("ttft_ms") else ""
        why = "; ".join(record.kept_because)
        parts.append(
            Text(f"  {record.request_id}  {record.outcome}, {first}{record.total_ms:.0f} ms in all: {why}")
        )
    parts += [Text(f"no answer from {address}", style="red") for address in missing]
    return Group(*parts)


def _head(model: ModelFigures) -> list[str]:
    ends = ", ".join(f"{rate:.1f} {outcome}" for outcome, rate in model.outcomes_per_s.items() if rate)
    waits = ", ".join(f"{number} {wait}" for wait, number in model.in_progress.items())
    lines = [
        f"{model.model}: {model.requests_per_s:.1f} requests/s, {model.prompt_tokens_per_s:.0f} prompt tokens/s"
        f" ({model.cached_share:.0%} cached); ends a second: {ends or 'none'}",
        f"{waits}; TTFT {_times(model.ttft)}; TPOT {_times(model.tpot)}",
    ]
    if model.ttft_long.attained is not None:
        lines.append(f"TTFT of long prompts {_times(model.ttft_long)}")
    return lines


def _times(times: LatencyFigures) -> str:
    if times.p50_ms is None or times.p99_ms is None or times.attained is None:
        return "not measured"
    return f"p50 {times.p50_ms:.1f} ms, p99 {times.p99_ms:.1f} ms, {times.attained:.1%} within target"


def _row(worker: WorkerFigures) -> list[RenderableType]:
    from rich.text import Text

    return [
        Text(worker.worker_id),
        worker.role,
        Text(worker.state, style=STATE_STYLES.get(worker.state, "")),
        str(worker.running_requests),
        str(worker.waiting_requests),
        str(worker.waiting_tokens),
        f"{worker.kv_used:.0%}",
        f"{worker.prefill_tokens_per_s:.0f}" if worker.prefill_tokens_per_s else "-",
        f"{worker.step_ms:.1f}" if worker.step_ms else "-",
    ]
