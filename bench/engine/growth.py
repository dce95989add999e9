"""How the engine's own cost per step grows: `python -m bench.engine.growth [--json]`. Under a minute, needs no model.

The runner computes nothing, tokens are bytes, so all that is left is scheduling, block accounts, detokenization and
outputs. Times are CPU time of the one thread, the median of many repeats. Each table changes one thing and leaves the
rest as in `BASE`:

* batch, context: what a step is about. Time may grow with the batch.
* waiting: requests in the queue while no slot is free (`slots`), or while there are slots but no blocks for the first
  in line, of whose prompts the first half is cached (`blocks`). Time must not grow.
* pool: blocks in the pool. Time must not grow.

`operations` are the same for what happens between steps; `pools` for making a pool and for taking and giving back
BLOCKS_A_TURN blocks, from one that is fresh, and from one whose every block is cached, so that each block taken is
one evicted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from bench.machine import report, this_machine
from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import ModelFacts, ModelRunner, SampledToken, SamplingParams, ScheduledSequence
from engine.kv_cache.block_pool import BlockPool
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.runtime.process import relax_collector

BLOCK_TOKENS = 16
BLOCKS_A_TURN = 64
STEPS = 100
STEPS_BEFORE = 20
REPEATS = 300
MANY_TOKENS = 2**20
LETTERS = 64
GREEDY = SamplingParams(temperature=0.0)
ROOM_BLOCKS = 10
"""Upper bound of the blocks by which a sequence grows during the measurement."""
FIRST_IN_LINE = 16
"""Prompts too long for the free blocks; short ones wait behind them."""


@dataclass(frozen=True)
class GrowthCase:
    """A decode step of `batch` sequences, all with `context` tokens, in a pool of `pool` blocks."""

    batch: int = 32
    context: int = 512
    waiting: int = 0
    waiting_for: Literal["slots", "blocks"] = "slots"
    pool: int = 65_536


BASE = GrowthCase()
TABLES: dict[str, Sequence[GrowthCase]] = {
    "batch": [replace(BASE, batch=batch) for batch in (1, 8, 32, 64)],
    "context": [replace(BASE, context=context) for context in (128, 512, 4096)],
    "waiting for slots": [replace(BASE, waiting=waiting) for waiting in (0, 100, 10_000)],
    "waiting for blocks": [
        replace(BASE, waiting=waiting, waiting_for="blocks", context=4096, pool=32 * (256 + ROOM_BLOCKS))
        for waiting in (0, 100, 10_000)
    ],
    "pool": [replace(BASE, context=128, pool=pool) for pool in (1_000, 65_536, 1_000_000)],
}
WAITING = (0, 100, 10_000)
POOLS = (1_000, 65_536, 1_000_000)


class IdleRunner(ModelRunner):
    """Runner that computes nothing and emits the alphabet. Its blocks have no memory."""

    def __init__(self, num_blocks: int) -> None:
        self.facts = ModelFacts(2**20, ByteTokenizer.EOS + 1, frozenset({ByteTokenizer.EOS}))
        self.layout = KvLayout("idle", "uint8", BLOCK_TOKENS, 1, 1, 8)
        self.num_blocks = num_blocks
        self.pool_memory = KvMemoryRegion(0, num_blocks, self.layout, probe_blocks=0)
        self.inside_s = 0.0

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """No blocks: there is no memory."""
        return []

    @override
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        began = time.thread_time()
        tokens = [
            SampledToken(97 + len(scheduled.token_ids) % 26) if scheduled.sample else None
            for scheduled in batch
        ]
        self.inside_s += time.thread_time() - began
        return tokens

    def close(self) -> None:
        """Releases nothing: the runner owns no memory."""


class MeasuredEngine:
    """A core on an idle runner."""

    def __init__(self, pool: int, max_running: int) -> None:
        self.runner = IdleRunner(pool)
        config = EngineConfig(
            max_running_requests=max_running, max_waiting_requests=10**6, max_step_tokens=MANY_TOKENS
        )
        self.core = EngineCore(self.runner, config, ByteTokenizer())
        self._asked = 0

    def add(self, prompt: tuple[int, ...], max_tokens: int = 10_000) -> str:
        """Queues a prompt; returns the request's name."""
        self._asked += 1
        name = f"request-{self._asked}"
        stop = StopParams(max_tokens, frozenset({ByteTokenizer.EOS}), ignore_eos=True)
        self.core.add_request(EngineRequest(name, prompt, GREEDY, stop, deadline_s=1e9 + self._asked))
        return name

    def step_us(self) -> float:
        """CPU time of one step outside the runner."""
        self.runner.inside_s, began = 0.0, time.thread_time()
        self.core.step()
        return (time.thread_time() - began - self.runner.inside_s) * 1e6


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """A prompt that shares no prefix."""
    head = tuple(number >> shift & 0xFF for shift in (24, 16, 8, 0))
    return (head + tuple(32 + place % LETTERS for place in range(tokens)))[:tokens]


def running(case: GrowthCase) -> MeasuredEngine:
    """An engine in the middle of decoding the case."""
    slots = case.batch + (case.waiting if case.waiting_for == "blocks" else 0)
    engine = MeasuredEngine(case.pool, slots)
    prompts = [prompt_of(number, case.context) for number in range(case.batch)]
    for prompt in prompts:
        engine.add(prompt)
    engine.core.step()
    # Half of the first waiting prompt is cached; for the other half no blocks are free.
    misfit = prompts[0][: case.context // 2] + prompt_of(2**31, ROOM_BLOCKS * case.batch * BLOCK_TOKENS)
    for number in range(case.waiting):
        first = case.waiting_for == "blocks" and number < FIRST_IN_LINE
        engine.add(misfit if first else prompt_of(2**31, 128))
    for _ in range(STEPS_BEFORE):
        engine.core.step()
    load = engine.core.load()
    assert (load.running_requests, load.waiting_requests) == (case.batch, case.waiting)
    return engine


def step_rows(cases: Sequence[GrowthCase]) -> list[dict[str, Any]]:
    """The median step of each case. Cases alternate, so that other load on the machine affects all alike."""
    engines = [running(case) for case in cases]
    turns = [[engine.step_us() for engine in engines] for _ in range(STEPS)]
    rows = []
    for case, times in zip(cases, zip(*turns, strict=True), strict=True):
        spent = median(times)
        rows.append(
            asdict(case) | {"step_us": round(spent, 1), "us_a_sequence": round(spent / case.batch, 2)}
        )
    return rows


def median_us(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """CPU time of one call."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return round(median(times) * 1e6, 2)


def operations_row(waiting: int) -> dict[str, Any]:
    """Cost of calls to a busy engine between two steps."""
    engine = running(replace(BASE, waiting=waiting))
    prompt = prompt_of(2**30, 128)
    names: list[str] = []
    return {
        "waiting": waiting,
        "add_request_us": median_us(lambda: names.append(engine.add(prompt))),
        "abort_us": median_us(lambda: engine.core.abort(names.pop())),
        "load_us": median_us(engine.core.load),
        "has_work_us": median_us(engine.core.has_work),
    }


def pool_row(blocks: int) -> dict[str, Any]:
    """Cost of creating a block pool, and of its operations."""
    made_us = median_us(lambda: BlockPool(blocks), 5)
    tracemalloc.start()
    pool = BlockPool(blocks)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    fresh_us = median_us(lambda: pool.release(pool.allocate(BLOCKS_A_TURN)))
    owned = pool.allocate(blocks)
    for block in owned:
        pool.cache(block, block.to_bytes(32, "big"))
    pool.release(owned)
    del owned
    names = iter(range(blocks, 2 * blocks))

    def evict() -> None:
        taken = pool.allocate(BLOCKS_A_TURN)
        for block in taken:
            pool.cache(block, next(names).to_bytes(32, "big"))
        pool.release(taken)

    cached_us = median_us(evict, min(REPEATS, blocks // BLOCKS_A_TURN))
    return {
        "blocks": blocks,
        "made_ms": round(made_us / 1e3, 3),
        "bytes_a_block": round(held / blocks, 1),
        "take_and_give_us": fresh_us,
        "evict_us": cached_us,
    }


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The result as a table."""
    shown = Table(title=title)
    for column in rows[0]:
        shown.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*map(str, row.values()))
    return shown


def main() -> int:
    """Tables, or one JSON object with `--json`, on stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.growth", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = this_machine()
    relax_collector()  # as in a worker's process
    tell, tables = Console(stderr=True), {}
    for name, cases in TABLES.items():
        tell.print(f"measuring a step, by {name}")
        tables[f"a step, by {name}"] = step_rows(cases)
    tell.print("measuring operations and pools")
    tables["operations"] = [operations_row(waiting) for waiting in WAITING]
    tables["pools"] = [pool_row(blocks) for blocks in POOLS]
    if options.json:
        command = shlex.join(["python", "-m", "bench.engine.growth", *sys.argv[1:]])
        rows = [{"table": name} | row for name, rows in tables.items() for row in rows]
        print(json.dumps(report("engine_growth", command, machine, rows=rows), indent=2))
        return 0
    for name, rows in tables.items():
        Console().print(table(name, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
