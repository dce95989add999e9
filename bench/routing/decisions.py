"""Cost of a routing decision: `python -m bench.routing`.

Each decision is what a request pays on the coordinator's event loop, a prompt of 2,048 tokens: the index is asked for
its 128 blocks, a pair is chosen, both workers are noted as sent to, the prompt's blocks as expected. Each worker
reports twice a second and 1,000 requests come a second, so that at 1,000 workers two have reported between two
decisions; a decision takes their figures in too. Half of the prompts are held by a few workers to some depth, the
others by nobody; every prompt begins with two blocks that all workers hold. Half of the requests name a session.

Prints JSON: microseconds by number of workers and of indexed blocks, by the wall clock and by the thread's CPU time,
which other processes on the machine disturb less; and bytes of memory for each indexed block, as `bytes_a_block` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import psutil

from bench.machine import report, this_machine
from bench.option_values import positive_whole, whole_number
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import RoutingRequest
from coordinator.workers.load import WorkerLoads
from coordinator.workers.prefix_index import PrefixIndex
from coordinator.workers.snapshot import Model, PoolSnapshot, Worker
from splitserve.generation.kv_blocks import NAME_BYTES
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.roles import PoolName
from splitserve.runtime.process import relax_collector
from splitserve.v1 import registry_pb2

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
COMMON_BLOCKS = 2
REPORTS_A_SECOND = 2
"""Block capacity of each worker."""
DECISIONS_A_SECOND = 1000
WARM_UP = 200
WORKERS = (10, 100, 1000)
BLOCKS = (10_000, 1_000_000)
MODEL = Model("m", "m", 100_000, 50_000, BLOCK_TOKENS)
KEY_BITS = 60
CHUNK = 2**12


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """Microseconds: wall clock, CPU time of the thread, and the index query's part of that."""

    workers: int
    indexed_blocks: int
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    query_p50_us: float
    query_p99_us: float


class RoutingPools:
    """Equal numbers of prefill and decode workers, all connected, and their registry snapshot."""

    def __init__(self, workers: int, chance: random.Random) -> None:
        self._chance, count = chance, workers // 2
        agents = [f"agent-{n}" for n in range(count)]
        lanes = tuple(registry_pb2.LaneReport(agent_id=agent, gb_per_second=20.0) for agent in agents)
        connected = frozenset(agents)
        self.workers = [self._worker(n, "decode", agent_id=agents[n]) for n in range(count)]
        self.workers += [
            self._worker(count + n, "prefill", connected_agents=connected, lanes=lanes) for n in range(count)
        ]
        self.loads = WorkerLoads.of(self.workers)
        self._snapshot: PoolSnapshot | None = None

    def _worker(self, number: int, pool: PoolName, agent_id: str = "", **changed: object) -> Worker:
        made = Worker(
            worker_id=f"{pool}-{number:04}",
            epoch=1,
            role=pool,
            address="h:1",
            model=MODEL,
            agent_id=agent_id or f"agent-p{number}",
            transport="nixl",
            block_size_tokens=BLOCK_TOKENS,
            max_running_requests=256,
            reported=True,
            output_open=True,
            block_bytes=2 * 2**20,
            load=self._load(),
        )
        return dataclasses.replace(made, **changed)  # type: ignore[arg-type]

    def _load(self) -> registry_pb2.WorkerLoad:
        chance = self._chance
        return registry_pb2.WorkerLoad(
            total_blocks=26_000,
            free_blocks=chance.randrange(5_000, 20_000),
            referenced_blocks=6_000,
            running_requests=chance.randrange(40),
            waiting_tokens=chance.randrange(8_000),
            latency=LatencyModel(
                PrefillLatency(0.0, 1 / chance.uniform(15_000, 20_000)),
                DecodeLatency(chance.uniform(0.010, 0.014)),
            ).to_proto(),
        )

    def reported(self, at: int, slot: int) -> None:
        """A worker's next report."""
        self.workers[at] = dataclasses.replace(self.workers[at], load=self._load(), prefix_slot=slot)
        self.loads.on_report(self.workers[at].key, self.workers[at].load)
        self._snapshot = None

    def sent(self, worker: Worker, tokens: int) -> None:
        """Counts a request as sent to this worker."""
        count = self.loads.count_stream if worker.decodes else self.loads.count_prompt
        count(worker.key, tokens)

    def snapshot(self) -> PoolSnapshot:
        """A snapshot of the pools, as `Registry.snapshot` gives it."""
        if self._snapshot is None:
            self._snapshot = PoolSnapshot(tuple(self.workers))
        return self._snapshot


def filled(pools: RoutingPools, blocks: int, chance: random.Random) -> tuple[PrefixIndex, list[list[int]]]:
    """A prefix index of a given number of blocks, and prompts that hit it."""
    index, sequence = PrefixIndex(2 * blocks), dict.fromkeys(range(len(pools.workers)), 0)

    def tell(at: int, keys: Sequence[int]) -> None:
        sequence[at] += 1
        events = registry_pb2.CacheEvents(
            sequence=sequence[at], cleared=sequence[at] == 1, stored=array("Q", keys).tobytes()
        )
        index.apply(pools.workers[at].key, events)

    common = [chance.getrandbits(KEY_BITS) for _ in range(COMMON_BLOCKS)]
    for at in range(len(pools.workers)):
        tell(at, common)
        pools.reported(at, index.slot_of(pools.workers[at].key))
    prompts = []
    for _ in range(min(1000, blocks // (8 * PROMPT_BLOCKS))):
        keys = common + [chance.getrandbits(KEY_BITS) for _ in range(PROMPT_BLOCKS - COMMON_BLOCKS)]
        for _ in range(4):
            tell(chance.randrange(len(pools.workers)), keys[: chance.randrange(COMMON_BLOCKS, PROMPT_BLOCKS)])
        prompts.append(keys)
    while len(index) < blocks:
        count = min(CHUNK, blocks - len(index))
        tell(chance.randrange(len(pools.workers)), [chance.getrandbits(KEY_BITS) for _ in range(count)])
    prompts += [
        common + [chance.getrandbits(KEY_BITS) for _ in range(PROMPT_BLOCKS - COMMON_BLOCKS)] for _ in prompts
    ]
    return index, prompts


def measured(workers: int, blocks: int, decisions: int, repeats: int = 1) -> RoutingRow:
    """Durations of decisions; the least one of repeated decisions."""
    runs = [_run(workers, blocks, decisions) for _ in range(repeats)]
    times = [[min(same) for same in zip(*kind, strict=True)] for kind in zip(*runs, strict=True)]
    return RoutingRow(workers, blocks, *(_micros(kind, share) for kind in times for share in (0.5, 0.99)))


def _run(workers: int, blocks: int, decisions: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each decision: wall clock, CPU time, and of that the query. Each run makes the same decisions."""
    chance = random.Random(0)
    pools = RoutingPools(workers, chance)
    index, prompts = filled(pools, blocks, chance)
    router = PrefixRouter()
    wall: list[float] = []
    cpu: list[float] = []
    queries: list[float] = []
    reports = 0.0
    relax_collector()  # as in a coordinator's process
    # Warm-up: the first decisions build the columns and grow the tables.
    for turn in range(-WARM_UP, decisions):
        reports += workers * REPORTS_A_SECOND / DECISIONS_A_SECOND
        while reports >= 1:
            at, reports = chance.randrange(workers), reports - 1
            pools.reported(at, index.slot_of(pools.workers[at].key))
        keys, now = chance.choice(prompts), turn / DECISIONS_A_SECOND
        session = f"s{turn % 997}" if turn % 2 else ""
        began, began_cpu = time.perf_counter(), time.thread_time()
        hits = index.hits(keys, now)
        asked = time.thread_time()
        request = RoutingRequest(
            MODEL.name, PROMPT_TOKENS, turn=turn, hits=hits, session_id=session, wants_candidates=True
        )
        pair = router.choose_pair(pools.snapshot(), pools.loads, request)
        if pair is None or pair.decode is None:
            raise AssertionError("every pair is connected")
        pools.sent(pair.prefill, PROMPT_TOKENS - pair.cost.cached_tokens)
        pools.sent(pair.decode, PROMPT_TOKENS)
        index.expect((pair.prefill.key, pair.decode.key), keys, now)
        cpu.append(time.thread_time() - began_cpu)
        wall.append(time.perf_counter() - began)
        queries.append(asked - began_cpu)
    return wall[WARM_UP:], cpu[WARM_UP:], queries[WARM_UP:]


def _micros(times: list[float], share: float) -> float:
    return round(sorted(times)[int(len(times) * share)] * 1e6, 1)


def bytes_a_block(blocks: int, workers: int = max(WORKERS)) -> tuple[float, float]:
    """Resident memory per block of a full index: once filled, and after all blocks were replaced once.

    The blocks are those of prompts of 128, each held by one to three workers.
    """
    chance, process, index = random.Random(1), psutil.Process(), PrefixIndex(blocks)
    sequence = dict.fromkeys(range(workers), 0)
    gc.collect()
    before = process.memory_info().rss
    taken, stored = [], 0
    for until in (blocks, 2 * blocks):
        while stored < until:
            names = chance.randbytes(PROMPT_BLOCKS * NAME_BYTES)
            stored += PROMPT_BLOCKS
            for worker in chance.sample(range(workers), chance.randint(1, 3)):
                sequence[worker] += 1
                events = registry_pb2.CacheEvents(
                    sequence=sequence[worker], cleared=sequence[worker] == 1, stored=names
                )
                index.apply((f"w{worker}", 1), events)
        taken.append(round((process.memory_info().rss - before) / len(index), 1))
    return taken[0], taken[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--workers", type=positive_whole, nargs="+", default=list(WORKERS))
    parser.add_argument("--blocks", type=positive_whole, nargs="+", default=list(BLOCKS))
    parser.add_argument("--decisions", type=positive_whole, default=5000)
    parser.add_argument(
        "--repeats", type=positive_whole, default=1, help="runs; the least time of each decision counts"
    )
    parser.add_argument(
        "--memory-blocks", type=whole_number, default=0, help="measure memory with this many blocks instead"
    )
    given = parser.parse_args(arguments)
    content: dict[str, object] = {}
    if given.memory_blocks:
        filled_bytes, used_bytes = bytes_a_block(given.memory_blocks)
        content = {"bytes_a_block_once_filled": filled_bytes, "bytes_a_block_in_use": used_bytes}
    else:
        rows = []
        for size, count in product(given.blocks, given.workers):
            print(f"measuring {count} workers, {size} blocks", file=sys.stderr, flush=True)
            rows.append(measured(count, size, given.decisions, given.repeats))
        content["rows"] = [asdict(row) for row in rows]
    command = "python -m bench.routing " + " ".join(arguments or sys.argv[1:])
    print(json.dumps(report("routing", command.strip(), this_machine(), **content), indent=1))
    return 0
