"""What routing predicts for one candidate, as arithmetic: shared by the router and by the simulator."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_PREFILL_TOKENS_PER_S = 2_000.0
"""Assumed until any worker of the pool has measured its own."""
DEFAULT_STEP_S = 0.02
TYPICAL_OUTPUT_TOKENS = 128
"""Steps that a running sequence is assumed to have left, when blocks are short."""

MOST_CROWDED = 12.0
"""What a second of computing counts for others where every prefill worker is busy. From 4 on the mean TTFT of traces is
flat, while the cache hits still rise; see docs/routing.md."""


def crowding(busy: int, ready: int) -> float:
    """How much a second of prefill counts for the requests behind it: nothing where all workers are idle.

    Work delays all that arrive until the worker is idle again, and that takes the longer the more of the time it is
    busy. The share of workers that are busy now is the measure of it.
    """
    return MOST_CROWDED * (busy / ready) ** 2 if ready else 0.0


def prefill_score_s(queued_tokens: float, prompt_tokens: int, tokens_per_s: float) -> float:
    """Seconds until a worker with this queue and rate has computed the prompt, were it queued there now."""
    return (queued_tokens + prompt_tokens) / tokens_per_s


def decode_score_s(
    needed_blocks: float,
    free_blocks: float,
    held_blocks: float,
    step_s: float,
    requests: float,
    max_running_requests: int,
    steps_left: float = TYPICAL_OUTPUT_TOKENS,
) -> float:
    """Seconds until a worker has room for the blocks, plus what its batch costs a step.

    Missing blocks come free at the rate at which running sequences end: each holds its share of
    `held_blocks` and has about `steps_left` steps left. The batch counts with one step,
    stretched by how full the batch is (`requests` in it or before it), so that an emptier worker wins
    while there is room.
    """
    short = needed_blocks - free_blocks
    wait_s = short / max(1, held_blocks) * steps_left * step_s if short > 0 else 0.0
    return wait_s + step_s * (1 + requests / max_running_requests)


def least(scores: Sequence[float], turn: int) -> int:
    """Index of the least score. Of several equals, the first from position `turn` on, around the end."""
    lowest = min(scores)
    start = turn % len(scores)
    try:
        return scores.index(lowest, start)
    except ValueError:
        return scores.index(lowest)
