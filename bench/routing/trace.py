"""The three routers on a trace: `python -m bench.routing.trace --trace mooncake_conversation.jsonl`.

The coordinator's router, two simpler ones, and its index place the trace's requests on simulated engines of 4 prefill
and 4 decode workers, each prefill worker with its own prefix cache (LRU). Reports come as in production. Printed for
each router and size of the caches:

* hits: prompt tokens not computed; of bound: the same over what one endless cache would have saved that had each
  prompt as soon as it arrived;
* TTFT in seconds: arrival to first token, queues and waits for decode included.

With caches that hold each worker's share, the prefix router must reach 95% of the bound and the least mean TTFT; the
exit code is 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from autoscaler.simulation.engine_model import PRESETS, EngineModel, preset
from autoscaler.simulation.traces.trace import BLOCK_TOKENS, Trace, load_trace
from bench.machine import report, this_machine
from bench.option_values import positive_whole, whole_number
from bench.routing.cluster import bound_tokens, replay
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Pair, Router, RoutingRequest
from coordinator.workers.load import WorkerLoads
from coordinator.workers.prefix_index import NO_HITS
from coordinator.workers.snapshot import PoolSnapshot, Worker
from splitserve.roles import PoolName

PAIRS = 4
OF_BOUND = 0.95
CACHES_TOKENS = (100_000_000, 12_000_000, 3_000_000, 420_000)
"""Cache sizes, tokens: all of the conversation trace (94 M), an eighth, a thirty-second, and the KV of one H100."""


@dataclass(frozen=True, slots=True)
class RoutingTraceRow:
    """One run. Times in seconds."""

    router: str
    cache_tokens: int
    """Size of the prefix cache of a prefill worker."""
    hit_share: float
    of_bound: float
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    utilization: float
    """Busy share of the prefill workers."""


class LeastWaitRouter(PrefixRouter):
    """The least predicted time where nothing is known of prefix caches."""

    @override
    def choose_pair(self, snapshot: PoolSnapshot, loads: WorkerLoads, request: RoutingRequest) -> Pair | None:
        return super().choose_pair(snapshot, loads, replace(request, hits=NO_HITS))


class RoundRobinRouter(Router):
    """Each worker in turn, whatever its load."""

    @override
    def choose_pair(self, snapshot: PoolSnapshot, loads: WorkerLoads, request: RoutingRequest) -> Pair | None:
        prefills = _turned(snapshot, request, "prefill")
        if not request.needs_decode:
            return Pair(prefills[0], None) if prefills else None
        decodes = _turned(snapshot, request, "decode")
        pairs = (
            Pair(prefill, decode) for prefill in prefills for decode in decodes if prefill.reaches(decode)
        )
        return next(pairs, None)


def _turned(snapshot: PoolSnapshot, request: RoutingRequest, pool: PoolName) -> list[Worker]:
    """The workers that may be chosen, beginning with the one whose turn it is."""
    workers = [
        worker for worker in snapshot.accepting(request.model, pool) if worker.key not in request.exclude
    ]
    start = request.turn % len(workers) if workers else 0
    return [*workers[start:], *workers[:start]]


def routers() -> dict[str, Router]:
    """A new router of each rule, by name."""
    return {"prefix": PrefixRouter(), "least-wait": LeastWaitRouter(), "round-robin": RoundRobinRouter()}


def compared(
    trace: Trace, engine: EngineModel, cache_tokens: int, pairs: int = PAIRS
) -> list[RoutingTraceRow]:
    """All routers on one trace, the prefix router first."""
    bound = bound_tokens(trace.requests)
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    rows = []
    for name, router in routers().items():
        run = replay(trace, engine, router, pairs, cache_tokens)
        waits = sorted(request.ttft_s for request in run.requests if request.ttft_s is not None)
        if len(waits) != len(trace.requests):
            raise AssertionError(f"{len(trace.requests) - len(waits)} requests were not served")
        rows.append(
            RoutingTraceRow(
                name,
                cache_tokens,
                hit_share=run.hit_tokens / prompt_tokens,
                of_bound=run.hit_tokens / max(1, bound),
                mean_ttft_s=sum(waits) / len(waits),
                p50_ttft_s=waits[len(waits) // 2],
                p99_ttft_s=waits[len(waits) * 99 // 100],
                utilization=run.utilization,
            )
        )
    return rows


def holds(rows: Sequence[RoutingTraceRow]) -> bool:
    """Whether the prefix router (first row) reaches the bound's share and has the least mean TTFT."""
    first, *others = rows
    return first.of_bound >= OF_BOUND and all(first.mean_ttft_s < other.mean_ttft_s for other in others)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing.trace", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="a trace with block ids (Mooncake's format)"
    )
    parser.add_argument("--engine", choices=sorted(PRESETS), default="h100-8b")
    parser.add_argument(
        "--requests", type=positive_whole, default=None, help="of the trace's beginning; default: all"
    )
    parser.add_argument("--cache-tokens", type=positive_whole, nargs="+", default=list(CACHES_TOKENS))
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="spreads arrivals inside the trace's ticks"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(arguments)
    whole = load_trace(given.trace, given.seed)
    trace = Trace(whole.name, whole.requests[: given.requests])
    engine, tables = preset(given.engine), []
    for cache_tokens in given.cache_tokens:
        print(f"replaying with caches of {cache_tokens:,} tokens", file=sys.stderr, flush=True)
        tables.append(compared(trace, engine, cache_tokens))
    if given.json:
        command = "python -m bench.routing.trace " + " ".join(arguments or sys.argv[1:])
        rows = [asdict(row) for rows in tables for row in rows]
        print(json.dumps(report("routing_trace", command, this_machine(), engine=given.engine, rows=rows)))
    else:
        _show(trace, tables)
    return 0 if holds(tables[0]) else 1


def _show(trace: Trace, tables: Sequence[Sequence[RoutingTraceRow]]) -> None:
    blocks = len({block for request in trace.requests for block in request.block_ids})
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    table = Table(
        title=f"{trace.name}: {len(trace.requests)} requests, {prompt_tokens / 1e6:.0f} M prompt tokens, "
        f"{blocks * BLOCK_TOKENS / 1e6:.0f} M distinct; bound {bound_tokens(trace.requests) / prompt_tokens:.1%}"
    )
    for column in ("cache a worker", "router", "hits", "of bound", "mean", "p50", "p99", "busy"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for rows in tables:
        for row in rows:
            times = (f"{value:.2f}" for value in (row.mean_ttft_s, row.p50_ttft_s, row.p99_ttft_s))
            shares = f"{row.hit_share:.1%}", f"{row.of_bound:.1%}"
            size = f"{row.cache_tokens / 1e6:g} M"
            table.add_row(size, row.router, *shares, *times, f"{row.utilization:.0%}")
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
