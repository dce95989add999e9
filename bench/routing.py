"""What a routing decision costs: `python -m bench.routing`.

Each decision is what a request pays on the coordinator's event loop, a prompt of 2,048 tokens: the index is asked for
its 128 blocks, a pair is chosen, both workers are noted as sent to, the prompt's blocks as expected. Between two
decisions some workers report, as many as would at this size. Half of the prompts are held by a few workers to some
depth, the others by nobody; every prompt begins with two blocks that all workers hold.

Prints JSON: microseconds by number of workers and of indexed blocks, and bytes of memory for each indexed block.
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

import psutil

from bench.machine import report, this_machine
from coordinator.pools import Model, PoolName, PoolSnapshot, Worker
from coordinator.prefix_index import PrefixIndex
from coordinator.prefix_router import PrefixRouter
from coordinator.routing import RouteRequest
from splitserve.v1 import registry_pb2

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
COMMON_BLOCKS = 2
REPORTS_A_DECISION = 4
"""At 1,000 workers: each reports twice a second, 500 requests come a second."""
WORKERS = (10, 100, 1000)
BLOCKS = (10_000, 100_000, 1_000_000, 10_000_000)
MODEL = Model("m", "m", 100_000, 50_000, BLOCK_TOKENS)
KEY_BITS = 60
CHUNK = 2**12


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds. `query_us` is the index's part."""

    workers: int
    indexed_blocks: int
    p50_us: float
    p99_us: float
    query_p50_us: float
    query_p99_us: float


class Pools:
    """As many prefill as decode workers, all connected, and the snapshot that a registry would give."""

    def __init__(self, workers: int, chance: random.Random) -> None:
        self._chance, count = chance, workers // 2
        agents = [f"agent-{n}" for n in range(count)]
        lanes = tuple(registry_pb2.LaneReport(agent_id=agent, gb_per_second=20.0) for agent in agents)
        connected = frozenset(agents)
        self.workers = [self._worker(n, "decode", agent_id=agents[n]) for n in range(count)]
        self.workers += [
            self._worker(count + n, "prefill", connected_agents=connected, lanes=lanes) for n in range(count)
        ]
        self.place = {worker.key: at for at, worker in enumerate(self.workers)}

    def _worker(self, number: int, pool: PoolName, agent_id: str = "", **changed: object) -> Worker:
        made = Worker(
            worker_id=f"{pool}-{number:04}",
            epoch=1,
            pool=pool,
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
            prefill_tokens_per_second=chance.uniform(15_000, 20_000),
            decode_step_ms=chance.uniform(10, 14),
        )

    def reported(self, at: int, slot: int) -> None:
        """A worker's next report."""
        self.workers[at] = dataclasses.replace(
            self.workers[at], load=self._load(), sent_tokens=0, sent_requests=0, prefix_slot=slot
        )

    def sent(self, worker: Worker, tokens: int) -> None:
        """A request went to this worker."""
        at = self.place[worker.key]
        self.workers[at] = dataclasses.replace(
            self.workers[at],
            sent_tokens=self.workers[at].sent_tokens + tokens,
            sent_requests=self.workers[at].sent_requests + 1,
        )


def filled(pools: Pools, blocks: int, chance: random.Random) -> tuple[PrefixIndex, list[list[int]]]:
    """An index of so many blocks, and prompts of which it holds something."""
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


def measured(workers: int, blocks: int, decisions: int, seed: int = 0) -> Row:
    """Times of so many decisions."""
    chance = random.Random(seed)
    pools = Pools(workers, chance)
    index, prompts = filled(pools, blocks, chance)
    router, whole, queries = PrefixRouter(), [], []
    reports = max(1, REPORTS_A_DECISION * workers // max(WORKERS))
    gc.collect()
    gc.freeze()
    for turn in range(decisions + 1):
        for _ in range(reports):
            at = chance.randrange(workers)
            pools.reported(at, index.slot_of(pools.workers[at].key))
        keys, now = chance.choice(prompts), turn / 500
        began = time.perf_counter()
        hits = index.hits(keys, now)
        asked = time.perf_counter()
        request = RouteRequest(MODEL.name, PROMPT_TOKENS, turn=turn, hits=hits, session_id=f"s{turn % 997}")
        pair = router.choose_pair(PoolSnapshot(tuple(pools.workers)), request, now)
        if pair is None or pair.decode is None:
            raise AssertionError("every pair is connected")
        pools.sent(pair.prefill, PROMPT_TOKENS - pair.parts.cached_tokens)
        pools.sent(pair.decode, PROMPT_TOKENS)
        index.expect((pair.prefill.key, pair.decode.key), keys, now)
        whole.append(time.perf_counter() - began)
        queries.append(asked - began)
    # The first one makes the columns of a cluster never seen before.
    whole, queries = sorted(whole[1:]), sorted(queries[1:])
    middle, late = decisions // 2, decisions * 99 // 100
    micros = (
        round(seconds * 1e6, 1) for seconds in (whole[middle], whole[late], queries[middle], queries[late])
    )
    gc.unfreeze()
    return Row(workers, blocks, *micros)


def bytes_a_block(blocks: int = max(BLOCKS)) -> float:
    """Resident memory that an index of this size takes, for each of its blocks."""
    chance, process, index = random.Random(1), psutil.Process(), PrefixIndex(blocks)
    gc.collect()
    before = process.memory_info().rss
    told = 0
    while told < blocks:
        told += CHUNK
        names = array("Q", [chance.getrandbits(64) for _ in range(CHUNK)]).tobytes()
        events = registry_pb2.CacheEvents(sequence=told // CHUNK, cleared=told == CHUNK, stored=names)
        index.apply(("w", 1), events)
    return (process.memory_info().rss - before) / len(index)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--decisions", type=int, default=3000)
    given = parser.parse_args(arguments)
    memory = round(bytes_a_block(max(given.blocks)), 1)
    rows = [measured(count, blocks, given.decisions) for blocks in given.blocks for count in given.workers]
    command = "python -m bench.routing " + " ".join(arguments or sys.argv[1:])
    content = {"bytes_per_indexed_block": memory, "rows": [asdict(row) for row in rows]}
    print(json.dumps(report("routing", command.strip(), this_machine(), **content), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
