"""What records, metrics and tracing cost the coordinator: `python -m bench.observability.observation_cost [--json]`.

Three coordinators with the same scripted workers, all on one core, the rest of the work on the other. One at a time is
asked for answers of 64 tokens over SSE, 64 streams, for a short window; then the next, in an order that changes from
turn to turn. Each figure is the CPU time of that coordinator over the tokens of its window, requests included. Windows
of one turn lie seconds apart, so what other work does to the machine affects all three alike; the result is the median
over the turns of the ratio to the first variant.

* off: no records, nobody scrapes, no tracing.
* records: the default records, and /metrics read once a second.
* before, with `--before FOLDER`: the coordinator of another checkout, as `off`.
* tracing: the same, and a tenth of the requests traced, to a receiver that discards the spans.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import grpc.aio
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from bench.front_door.cases import ANSWER_TOKENS, STREAMS
from bench.front_door.processes import (
    HOST,
    Cores,
    Process,
    coordinator,
    generate_load,
    scripted_workers,
    split_cores,
)
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole
from launcher.cluster.placement import available_cores
from splitserve.config.coordinator import CoordinatorConfig, RecordsConfig
from splitserve.config.tracing import RequestTracingConfig

MODEL, VOCABULARY = "smollm2-135m-instruct", 49_152
SCRAPE_S = 1.0
SCRAPE_TIMEOUT_S = 30.0
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
OFF, BEFORE = "off", "before"
UNWATCHED = (OFF, BEFORE)
"""Variants whose metrics nobody reads."""


class DiscardedSpans(grpc.GenericRpcHandler):
    """Answers every export of spans with an empty message. `exports` counts them."""

    def __init__(self) -> None:
        self.exports = 0

    @override
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return grpc.unary_unary_rpc_method_handler(self._export) if details.method == EXPORT else None

    async def _export(self, spans: bytes, context: object) -> bytes:
        self.exports += 1
        return b""


@asynccontextmanager
async def span_receiver() -> AsyncIterator[tuple[DiscardedSpans, str]]:
    """A receiver of spans in this process, and its URL."""
    server, discarded = grpc.aio.server(), DiscardedSpans()
    server.add_generic_rpc_handlers((discarded,))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield discarded, f"http://{HOST}:{port}"
    finally:
        await server.stop(None)


def configs(endpoint: str) -> dict[str, CoordinatorConfig]:
    """A coordinator's settings by variant."""
    none = RecordsConfig(max_recent_records=0, max_notable_records=0)
    traced = RequestTracingConfig(endpoint=endpoint, sample_ratio=0.1)
    plain = CoordinatorConfig(max_running_requests=20_000)
    return {
        OFF: plain.model_copy(update={"records": none}),
        "records": plain,
        "tracing": plain.model_copy(update={"tracing": traced}),
    }


async def _scrape_on(front: Process) -> None:
    """Reads /metrics until it is cancelled."""
    while True:
        await asyncio.to_thread(_scrape, front.http)
        await asyncio.sleep(SCRAPE_S)


def _scrape(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        if connection.getresponse().read().count(b"\n") == 0:
            raise RuntimeError(f"{address}: no metrics")
    finally:
        connection.close()


async def _window(front: Process, cores: Cores, seconds: float, *, scraped: bool) -> float:
    """CPU microseconds of this coordinator per token."""
    scraper = asyncio.ensure_future(_scrape_on(front)) if scraped else None
    try:
        load = await generate_load(
            cores.rest,
            entrypoint="sse",
            target=front.http,
            pid=front.pid,
            max_tokens=ANSWER_TOKENS,
            streams=STREAMS,
            seconds=seconds,
            model=MODEL,
        )
    finally:
        if scraper is not None:
            scraper.cancel()
            await asyncio.gather(scraper, return_exceptions=True)
    return float(load["cpu_us_per_token_all"])


async def measure(
    turns: int, seconds: float, step_ms: float, before: Path | None, tell: Console
) -> list[dict[str, float]]:
    """For each turn the CPU microseconds per token by variant. Raises RuntimeError if no spans were exported."""
    cores = split_cores(available_cores())
    turn_costs: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        spans, endpoint = await stack.enter_async_context(span_receiver())
        fronts = {
            name: await stack.enter_async_context(coordinator(config, cores.front))
            for name, config in configs(endpoint).items()
        }
        if before is not None:
            plain = CoordinatorConfig(max_running_requests=20_000)
            fronts[BEFORE] = await stack.enter_async_context(coordinator(plain, cores.front, before))
        names = list(fronts)
        targets = [front.grpc for front in fronts.values()]
        await stack.enter_async_context(scripted_workers(targets, step_ms, MODEL, VOCABULARY, cores.rest))
        for turn in range(turns):
            order = [*names[turn % len(names) :], *names[: turn % len(names)]]
            spent = {
                name: await _window(fronts[name], cores, seconds, scraped=name not in UNWATCHED)
                for name in order
            }
            turn_costs.append({name: round(spent[name], 2) for name in names})
            tell.print(f"turn {turn + 1} of {turns}: {turn_costs[-1]}")
    if not spans.exports:
        raise RuntimeError("no spans were exported")
    return turn_costs


def ratios(rows: list[dict[str, float]]) -> Mapping[str, float]:
    """The median ratio to `off` by variant."""
    return {name: round(median(row[name] / row[OFF] for row in rows), 4) for name in rows[0] if name != OFF}


def main() -> int:
    """Progress goes to stderr; the table, or one JSON object with `--json`, to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.observability.observation_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--turns", type=positive_whole, default=12, help="windows of each variant")
    parser.add_argument("--seconds", type=positive_number, default=3.0, help="length of a window")
    parser.add_argument(
        "--step-ms", type=positive_number, default=15.0, help="time of a step of the scripted workers"
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout to compare with")
    options = parser.parse_args()
    machine = this_machine()
    tell = Console(stderr=True)
    rows = asyncio.run(measure(options.turns, options.seconds, options.step_ms, options.before, tell))
    if options.json:
        command = shlex.join(["python", "-m", "bench.observability.observation_cost", *sys.argv[1:]])
        print(json.dumps(report("observation_cost", command, machine, ratios=ratios(rows), rows=rows)))
        return 0
    table = Table("variant", "us a token", "to off")
    for name in rows[0]:
        ratio = ratios(rows).get(name, 1.0)
        table.add_row(name, f"{median(row[name] for row in rows):.1f}", f"{ratio:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
