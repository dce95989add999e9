"""The routers on a short synthetic trace of conversations: hits near the bound, waits below those of the baselines."""

from __future__ import annotations

import random

from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.traces.trace import BLOCK_TOKENS, Trace, TraceRequest
from bench.routing.cluster import bound_tokens
from bench.routing.trace import compared, holds

BIG_TOKENS = 20_000_000


def conversations(count: int, turns: int, requests_per_s: float, seed: int) -> Trace:
    """Conversations that begin with one of four system prompts and grow by a few blocks each turn."""
    chance, number, asked = random.Random(seed), 1000, []
    for _ in range(count):
        began_s = chance.uniform(0, count * turns / requests_per_s)
        blocks = [chance.randrange(4)]
        for turn in range(turns):
            fresh = chance.randrange(2, 16)
            blocks = [*blocks, *range(number, number + fresh)]
            number += fresh
            length = len(blocks) * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS)
            asked.append(
                TraceRequest(began_s + 30.0 * turn, length, chance.randrange(20, 300), tuple(blocks))
            )
    asked.sort(key=lambda request: request.arrival_s)
    return Trace("conversations", asked)


def test_prefix_routing_reaches_the_bound_and_waits_least() -> None:
    trace = conversations(count=150, turns=5, requests_per_s=4.0, seed=3)
    rows = compared(trace, preset("h100-8b"), BIG_TOKENS)
    assert [row.router for row in rows] == ["prefix", "least-wait", "round-robin"]
    assert holds(rows), rows
    assert rows[0].of_bound > rows[1].of_bound + 0.2


def test_small_caches_still_gain() -> None:
    trace = conversations(count=100, turns=5, requests_per_s=4.0, seed=4)
    prefix, *others = compared(trace, preset("h100-8b"), 300_000)
    assert all(prefix.hit_share > other.hit_share for other in others)
    assert all(prefix.mean_ttft_s < other.mean_ttft_s for other in others)


def test_the_bound_counts_what_came_before() -> None:
    first, second = TraceRequest(0.0, 1000, 5, (1, 2)), TraceRequest(1.0, 1500, 5, (1, 2, 3))
    assert bound_tokens([first, second]) == 2 * BLOCK_TOKENS
    assert bound_tokens([first, first]) == 999
