"""What a fetch from a peer's cache is worth: `python -m bench.kv_tiers.peer_fetch`.

Three neutral workers, or two prefill workers and a decode worker, behind a coordinator that takes turns, so that a
prompt comes to a worker that lacks what the other one has just computed. Each turn has a new prefix: the first prompt
is computed; of the second, with another tail, the prefix is fetched, as far as the coordinator chooses to. Reported are
times to the first token, and of the fetches what was predicted, what they took, and in which part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.asking import ask, random_prompt
from bench.cluster import running_cluster
from bench.kv_tiers.fetch_parts import FetchTimesRow, misses, spreads, times_of
from bench.machine import report, this_machine
from bench.option_values import positive_whole
from splitserve.client import AsyncClient
from splitserve.cluster.child_process import Event
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig

MODEL = "smollm2-135m-instruct"
FRONT = "front"
TAIL_TOKENS = 16
WARM_UP = 6
"""Requests before the first turn."""
REPORTED_S = 1.5
"""Within this a worker's new blocks are in the coordinator's index."""
SETTINGS = CoordinatorConfig(peer_fetch="on", routing="round-robin", leanings="fixed", hybrid="off")


@dataclass(frozen=True)
class FetchRow:
    """Medians over the turns with prefixes of `tokens`. Times in milliseconds."""

    tokens: int
    turns: int
    fetches: int
    computed_ttft_ms: float
    """Of prompts that were computed."""
    fetched_ttft_ms: float
    """Of prompts whose prefix was fetched before."""
    took_ms: float
    predicted_ms: float
    predicted_compute_ms: float
    within_quarter: int
    """Fetches that were near what was predicted; see `bench.kv_tiers.fetch_parts`."""
    ratios: list[float]
    """What each took over what was predicted, in order."""
    sooner: int
    """Fetches that took less than computing the same tokens took in the same turn."""
    spreads: dict[str, tuple[float, float]]
    """Median of each part of a fetch, and the median distance from it; see `bench.kv_tiers.fetch_parts`."""
    misses: list[str]
    """Of those that were not within a quarter: ratio, and what was furthest off."""
    parts: list[FetchTimesRow]


@dataclass
class Seen:
    """Events of fetches, as the processes log them."""

    fetches: list[Event] = field(default_factory=list)
    written: Event | None = None
    """Of the last prefix that its holder has written."""

    def on_event(self, event: Event) -> None:
        """Takes an event of any process."""
        if event["event"] == "prefix.fetched":
            self.fetches.append(event)
        elif event["event"] == "handoff.written" and event.get("request_id", "").startswith("prefix-"):
            self.written = event


async def rows_of(model: str, lengths: Sequence[int], turns: int, *, pinned: bool = False) -> list[FetchRow]:
    """A row for each length. `pinned`: with workers of two pools."""
    seen = Seen()

    engine = EngineConfig(num_blocks=64 + (2 * turns + 2) * max(lengths) // 16, threads=1)
    config = ClusterConfig(model=model, engine=engine, workers=3)
    if pinned:
        config = ClusterConfig(model=model, engine=engine, prefill=2, decode=1)
    async with running_cluster(config, {FRONT: SETTINGS}, seen.on_event) as cluster:
        client, dice = cluster.clients[FRONT], random.Random(7)
        for number in range(WARM_UP):  # every worker computes, and some hand off what they have computed
            await ask(client, random_prompt(dice, lengths[number % len(lengths)]), 2)
        return [await _row(client, dice, length, turns, seen) for length in lengths]


async def _row(client: AsyncClient, dice: random.Random, tokens: int, turns: int, seen: Seen) -> FetchRow:
    fetches, computed, fetched, chosen = seen.fetches, [], [], []
    parts: list[FetchTimesRow] = []
    for _ in range(turns):
        prefix, before, seen.written = random_prompt(dice, tokens), len(fetches), None
        first = await ask(client, [*prefix, *random_prompt(dice, TAIL_TOKENS)], 1)
        await asyncio.sleep(REPORTED_S)
        second = await ask(client, [*prefix, *random_prompt(dice, TAIL_TOKENS)], 1)
        await asyncio.sleep(REPORTED_S)  # and its log event is here
        computed.append(first.token_s[0])
        if len(fetches) > before and not fetches[-1]["failure"]:
            fetched.append(second.token_s[0])
            chosen.append((fetches[-1], first.token_s[0]))
            parts.append(times_of(fetches[-1], seen.written))
    return FetchRow(
        tokens,
        turns,
        len(chosen),
        _median_ms(computed),
        _median_ms(fetched),
        round(median([part.took for part in parts] or [0.0]), 1),
        round(median([part.predicted for part in parts] or [0.0]), 1),
        round(median([event["compute_ms"] for event, _ in chosen] or [0.0]), 1),
        sum(part.is_near for part in parts),
        [round(part.ratio, 2) for part in parts],
        sum(event["took_ms"] / 1e3 < computed_s for event, computed_s in chosen),
        spreads(parts) if parts else {},
        misses(parts),
        parts,
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 1) if seconds else 0.0


def main() -> int:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--tokens", type=positive_whole, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--turns", type=positive_whole, default=8)
    parser.add_argument(
        "--pinned", action="store_true", help="pools of two prefill workers and a decode worker"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    machine = this_machine()
    measuring = rows_of(options.model, options.tokens, options.turns, pinned=options.pinned)
    rows: list[dict[str, Any]] = [asdict(row) for row in asyncio.run(measuring)]
    if options.json:
        command = shlex.join(["python", "-m", "bench.kv_tiers.peer_fetch", *sys.argv[1:]])
        print(json.dumps(report("peer_fetch", command, machine, model=options.model, rows=rows)))
        return 0
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
