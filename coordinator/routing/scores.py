"""The arithmetic of routing predictions, shared by the routers and the simulator."""

from __future__ import annotations

from coordinator.request.estimates import DEFAULT_OUTPUT_TOKENS

MOST_CROWDED = 12.0
"""Weight of a second of prefill for other requests when every prefill worker is busy. From 4 on, the mean TTFT of
traces is flat while cache hits still rise; see docs/routing.md."""


def crowding(busy: int, ready: int) -> float:
    """Weight of a second of prefill for the requests behind it: 0 when all workers are idle.

    Work delays everything that arrives until the worker is idle again, which takes the longer the busier it is. The
    share of busy workers is the measure of that.
    """
    return MOST_CROWDED * (busy / ready) ** 2 if ready else 0.0


def prefill_score_s(queued_tokens: float, prompt_tokens: int, tokens_per_s: float) -> float:
    """Seconds until a worker with this queue and rate would have computed the prompt if it were queued there now."""
    return (queued_tokens + prompt_tokens) / tokens_per_s


def decode_score_s(
    needed_blocks: float,
    free_blocks: float,
    held_blocks: float,
    step_s: float,
    requests: float,
    max_running_requests: int,
    steps_left: float = DEFAULT_OUTPUT_TOKENS,
) -> float:
    """Seconds until a worker has room for the blocks, plus the cost of a step in its batch.

    Missing blocks become free as running sequences end: each holds its share of `held_blocks` and has about
    `steps_left` steps left. The batch counts as one step, stretched by its fill (`requests` in it or ahead of it), so
    that an emptier worker wins while there is room.
    """
    short = needed_blocks - free_blocks
    wait_s = short / max(1, held_blocks) * steps_left * step_s if short > 0 else 0.0
    return wait_s + step_s * (1 + requests / max_running_requests)
