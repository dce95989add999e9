"""How soon a worker that starts has what others have cached, with real weights: `python -m bench.kv_tiers.seeding`.

Neutral workers in float32, and prefixes that were asked for several times. One worker is killed; the one that is
started in its place is seeded by the others. Then every prefix is asked for again, in turns over all workers. Reported
are the seeding's own time, tokens of prompts found in caches before and after, and answers that are not what they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.asking import random_prompt
from bench.cluster import Fronts, running_cluster
from bench.kv_tiers.peer_fetch import FRONT, MODEL, REPORTED_S, SETTINGS, TAIL_TOKENS
from bench.machine import report, this_machine
from bench.option_values import positive_whole
from splitserve.client import AsyncClient
from splitserve.cluster.child_process import Event
from splitserve.config.cluster import ClusterConfig
from splitserve.config.engine import EngineConfig

ANSWER_TOKENS = 4
WORKERS = 3
PATIENCE_S = 240.0


@dataclass(frozen=True)
class SeedRow:
    """One worker's start."""

    prefixes: int
    tokens: int
    """Of each."""
    seeded_blocks: int
    seeding_s: float
    hit_share_before: float
    """Tokens of the prefixes that prompts found in caches, in the last round before, and in the first one after."""
    hit_share_after: float
    by_new_worker: int
    """Prompts that the new worker computed in that round."""
    wrong_answers: int


async def row_of(model: str, prefixes: int, tokens: int) -> SeedRow:
    """Starts a cluster, and one of its workers again."""
    seeded: asyncio.Queue[Event] = asyncio.Queue()

    def on_event(event: Event) -> None:
        if event["event"] == "worker.seeded":
            seeded.put_nowait(event)

    engine = EngineConfig(num_blocks=64 + 4 * prefixes * tokens // 16, threads=1, dtype="float32")
    config = ClusterConfig(model=model, engine=engine, workers=WORKERS)
    async with running_cluster(config, {FRONT: SETTINGS}, on_event) as cluster:
        client, dice = cluster.clients[FRONT], random.Random(11)
        prompts = [[*random_prompt(dice, tokens), *random_prompt(dice, TAIL_TOKENS)] for _ in range(prefixes)]
        expected: dict[int, tuple[int, ...]] = {}
        for _ in range(WORKERS):  # every worker that computes prompts has computed or fetched all
            before = await _round(client, prompts, expected)
            await asyncio.sleep(REPORTED_S)
        victim = sorted(before.workers)[-1]
        event = await _again(cluster, victim, seeded)
        after = await _round(client, prompts, expected)
    return SeedRow(
        prefixes,
        tokens,
        int(event["blocks"]),
        float(event["took_s"]),
        round(before.cached / (prefixes * tokens), 3),
        round(after.cached / (prefixes * tokens), 3),
        after.workers.count(victim),
        before.wrong + after.wrong,
    )


@dataclass
class _Round:
    workers: list[str]
    cached: int = 0
    wrong: int = 0


async def _round(
    client: AsyncClient, prompts: Sequence[list[int]], expected: dict[int, tuple[int, ...]]
) -> _Round:
    """Asks for every prompt; the first answers become the expected ones."""
    found = _Round([])
    for number, prompt in enumerate(prompts):
        answer = await client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        found.workers.append(answer.served_by.prefill_worker)
        found.cached += min(answer.usage.cached_prompt_tokens, len(prompt) - TAIL_TOKENS)
        found.wrong += expected.setdefault(number, tuple(answer.token_ids)) != tuple(answer.token_ids)
    return found


async def _again(cluster: Fronts, victim: str, seeded: asyncio.Queue[Event]) -> Event:
    """Kills a worker; the event of its successor's seeding."""
    while not seeded.empty():
        seeded.get_nowait()
    os.kill(cluster.pids[victim], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = await seeded.get()
            if event["worker_id"] == victim:
                await asyncio.sleep(REPORTED_S)
                return event


def main() -> int:
    """Runs the benchmark and prints its row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prefixes", type=positive_whole, default=8)
    parser.add_argument("--tokens", type=positive_whole, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    machine = this_machine()
    row = asdict(asyncio.run(row_of(options.model, options.prefixes, options.tokens)))
    if options.json:
        command = shlex.join(["python", "-m", "bench.kv_tiers.seeding", *sys.argv[1:]])
        print(json.dumps(report("seeding", command, machine, model=options.model, rows=[row])))
        return 0
    print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
