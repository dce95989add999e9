"""The arithmetic of routing predictions, shared by the routers and the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from coordinator.request.candidates import PairCost
from coordinator.request.estimates import DEFAULT_OUTPUT_TOKENS
from coordinator.routing.router import RoutingRequest, held_prefix
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.prefix_index.tier_reads import brought
from coordinator.workers.snapshot import Worker
from splitserve.generation.kv_blocks import blocks_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Size = TypeVar("Size", float, "float | npt.NDArray[np.float64]")

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


def queue_weight(class_rank: int) -> float:
    """Share of a queue that a request of this class waits for: it does not wait for those that it overtakes."""
    return float(2.0**-class_rank)


def pair_cost(
    prefill: Worker,
    decode: Worker | None,
    loads: LoadLedger,
    request: RoutingRequest,
    rate: float,
    step_s: float,
    byte_s: float,
    others_token_s: float = 0.0,
) -> PairCost:
    """The predicted cost of one connected pair.

    `rate` is the prefill worker's prompt tokens per second, `step_s` the decode worker's seconds per step, `byte_s`
    the lane's seconds per byte; pool means stand in for missing measurements. `others_token_s` is the delay for other
    requests per computed token, in seconds.
    """
    cached, read_s = held_prefix(prefill, request, 1 / rate)
    queue_s = prefill_score_s(loads.prefill[prefill.key].queued_tokens, 0, rate) * queue_weight(
        request.class_rank
    )
    read_s = max(0.0, read_s - queue_s)
    known, fetch_s = fetched(prefill, request, cached, rate)
    prefill_s = prefill_score_s(0, request.prompt_tokens - known, rate)
    others_s = (request.prompt_tokens - known) * others_token_s
    if decode is None:
        return PairCost(queue_s, prefill_s, others_s, fetch_s=fetch_s, read_s=read_s, cached_tokens=cached)
    load, size = loads.decode[decode.key], decode.block_size_tokens
    blocks = blocks_for(request.prompt_tokens, size)
    held = min(request.hits.blocks(decode.prefix_slot), blocks)
    block_s, read_back_s = decode.block_bytes * byte_s, 0.0
    if (below := brought(decode, request.hits, held, block_s)) is not None:
        read_back_s = float(below.lacking) * block_s + float(below.read_s)
    wait_s = decode_score_s(
        needed_blocks=needed_blocks(request, float(size)),
        free_blocks=load.free_blocks,
        held_blocks=load.held_blocks,
        step_s=step_s,
        requests=load.batch_requests,
        max_running_requests=decode.max_running_requests,
        steps_left=request.expected_output_tokens,
    )
    if request.computed_at_decode:
        wait_s += load.prompts_s * queue_weight(request.class_rank)
    return PairCost(
        queue_s,
        prefill_s,
        others_s,
        transfer_s=(blocks - held) * block_s + read_back_s,
        decode_wait_s=wait_s,
        fetch_s=fetch_s,
        read_s=read_s,
        cached_tokens=cached,
        decode_cached_tokens=min(held * size, request.prompt_tokens),
    )


def fetched(worker: Worker, request: RoutingRequest, cached: int, rate: float) -> tuple[int, float]:
    """Leading tokens that a worker does not compute if it fetches what it can, and the seconds of that; `cached` and 0
    where computing is as soon."""
    offer = request.offer
    if offer is None:
        return cached, 0.0
    fetch_s = offer.sooner_s(worker, cached, (offer.tokens - cached) / rate)
    return (cached, 0.0) if fetch_s is None else (offer.tokens, fetch_s)


def needed_blocks(request: RoutingRequest, block_size: Size) -> Size:
    """KV blocks that the request will need on decode: for its prompt and its expected output; elementwise for an
    array."""
    return (request.prompt_tokens + 1 + request.expected_output_tokens) // block_size + 1.0
