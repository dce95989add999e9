"""Routing by predicted time to first token, prefix caches considered: the pair with the least sum. Pure.

For a prefill worker p and a decode worker d, with figures of `RouteRequest` and the workers' last reports:

    queue     tokens queued at p / its rate, weighed by priority
    prefill   prompt tokens that p does not hold / its rate
    others    prompt tokens that p does not hold / the pool's mean rate, `route_scores.crowding` times: what the work
              delays those who come behind
    transfer  bytes of the prompt's blocks that d does not hold / speed of the lane from p to d
    decode    wait for blocks at d, and what its batch costs a step (`route_scores.decode_score_s`)

Queue, prefill and transfer are Mooncake's Algorithm 1 (Qin et al., FAST 2025); the rest and the choice of both at once
are ours. docs/routing.md explains each term. `pair_cost` says it for one pair; `PrefixRouter` computes the
same for whole pools, and looks at the pairs of the most promising prefill workers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.pools import PoolSnapshot, Worker
from coordinator.route_rows import Column, DecodeRows, ModelRows, Pool, PrefillRows
from coordinator.route_scores import decode_score_s, prefill_score_s
from coordinator.routing import Pair, RouteParts, RouteRequest, cached_tokens

HOME_SHARE = 0.25
"""How much slower a session's home may be than the best worker: this share of computing the whole prompt there, of one
step of decode. A quarter keeps a session where it is while loads wobble, and lets it go before it waits."""
PRIORITY_HALVES = 50.0
"""So much more priority halves what the queue counts: who overtakes does not wait for the overtaken."""
MAX_ROWS = 64
"""Prefill workers whose pairs are looked at, once there is a pair; mostly one or two suffice for the exact answer."""
MAX_MODELS = 64


def queue_weight(priority: int) -> float:
    """How much of a queue a request of this priority waits for: 1 at 0, halved by each `PRIORITY_HALVES`."""
    return float(2.0 ** (-priority / PRIORITY_HALVES))


def pair_cost(
    prefill: Worker,
    decode: Worker | None,
    request: RouteRequest,
    rate: float,
    step_s: float,
    byte_s: float,
    others_token_s: float = 0.0,
) -> RouteParts:
    """The prediction for one pair that is connected.

    `rate` is p's prompt tokens a second, `step_s` the duration of d's step, `byte_s` seconds a byte of the lane; they
    are the pools' means where a worker has no measurement. `others_token_s` is what a computed token costs others.
    """
    queued = prefill.load.waiting_tokens + prefill.sent_tokens
    cached = cached_tokens(prefill, request)
    queue_s = prefill_score_s(queued, 0, rate) * queue_weight(request.priority)
    prefill_s = prefill_score_s(0, request.prompt_tokens - cached, rate)
    others_s = (request.prompt_tokens - cached) * others_token_s
    if decode is None:
        return RouteParts(queue_s, prefill_s, others_s, cached_tokens=cached)
    load, size = decode.load, decode.block_size_tokens
    blocks = -(-request.prompt_tokens // size)
    held = min(request.hits.blocks(decode.prefix_slot), blocks)
    wait_s = decode_score_s(
        needed_blocks=needed_blocks(request, size),
        free_blocks=load.free_blocks + (-decode.sent_tokens // size),
        held_blocks=load.referenced_blocks + load.reserved_blocks,
        step_s=step_s,
        requests=load.running_requests
        + load.waiting_requests
        + load.waiting_reservations
        + decode.sent_requests,
        max_running_requests=decode.max_running_requests,
        steps_left=request.expected_output_tokens,
    )
    return RouteParts(
        queue_s,
        prefill_s,
        others_s,
        transfer_s=(blocks - held) * decode.block_bytes * byte_s,
        decode_wait_s=wait_s,
        cached_tokens=cached,
        decode_cached_tokens=min(held * size, request.prompt_tokens),
    )


def needed_blocks(request: RouteRequest, block_size: int) -> float:
    """KV blocks that the request will need on decode: its prompt, and the answer that is expected."""
    return float((request.prompt_tokens + 1 + request.expected_output_tokens) // block_size + 1)


@dataclass(slots=True)
class _Best:
    total_s: float = float("inf")
    prefill: int = -1
    decode: int = -1


class PrefixRouter:
    """The pair of least predicted time, sessions held near their homes; see the module.

    It keeps the columns of the last snapshot it saw, to save time: what it answers depends on its arguments alone.
    """

    def __init__(self) -> None:
        self._models: dict[str, ModelRows] = {}

    def choose_pair(self, snapshot: PoolSnapshot, request: RouteRequest, now: float) -> Pair | None:
        """See `coordinator.routing.Router`."""
        rows = self._rows(request.model)
        rows.refresh(snapshot)
        prefill, decode = rows.prefill, rows.decode
        if not prefill.workers or (request.needs_decode and not decode.workers):
            return None
        width = max(prefill.width, decode.width)
        depths = request.hits.by_slot(width) if request.hits and width else None
        p_score = _prefill_scores(prefill, request, depths)
        if not request.needs_decode:
            first = _first_least(p_score, request.turn)
            return None if p_score[first] == np.inf else _pair(prefill, first, None, 0, request)
        bytes_lacking = _bytes_lacking(decode, request, depths)
        best = _least_pair(p_score, _decode_scores(decode, request), bytes_lacking, prefill, request.turn)
        return None if best.prefill < 0 else _pair(prefill, best.prefill, decode, best.decode, request)

    def _rows(self, model: str) -> ModelRows:
        rows = self._models.get(model)
        if rows is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            rows = self._models[model] = ModelRows(model)
        return rows


def _prefill_scores(pool: PrefillRows, request: RouteRequest, depths: Column | None) -> Column:
    """Queue and prefill of each worker, in seconds; infinite for who must not be used."""
    scores: Column = pool.token_s * request.prompt_tokens
    scores += pool.queue_s if not request.priority else pool.queue_s * queue_weight(request.priority)
    if depths is not None:
        size = pool.workers[0].block_size_tokens
        blocks = depths.take(pool.slots, mode="wrap")
        np.minimum(blocks, (request.prompt_tokens - 1) / size, out=blocks)
        # What others save is measured from the whole prompt down, which moves all scores alike.
        saved_s = pool.token_s + _others_token_s(pool)
        saved_s *= size
        saved_s *= blocks
        scores -= saved_s
    if request.session_id:
        home = pool.home(request.session_id)
        scores[home] -= HOME_SHARE * request.prompt_tokens * pool.token_s[home]
    return _without_excluded(scores, pool, request)


def _others_token_s(pool: PrefillRows) -> float:
    # At the pool's rate: a worker's own wobbles with the prompts it has had, and here that would be multiplied.
    return pool.crowded * pool.mean_token_s


def _decode_scores(pool: DecodeRows, request: RouteRequest) -> Column:
    """Wait and batch of each worker, in seconds; infinite for who must not be used."""
    needed = needed_blocks(request, pool.workers[0].block_size_tokens)
    scores: Column
    if needed <= pool.free[pool.free.argmin()]:
        scores = pool.batch_s.copy()
    else:
        scores = needed - pool.free
        np.maximum(scores, 0.0, out=scores)
        scores *= pool.block_s
        scores *= request.expected_output_tokens
        scores += pool.batch_s
    if request.session_id:
        home = pool.home(request.session_id)
        scores[home] -= HOME_SHARE * pool.step_s[home]
    return _without_excluded(scores, pool, request)


def _bytes_lacking(pool: DecodeRows, request: RouteRequest, depths: Column | None) -> Column | float:
    """KV bytes of the prompt that each worker does not hold; one number where they all hold nothing."""
    one = pool.workers[0]
    blocks = -(-request.prompt_tokens // one.block_size_tokens)
    if depths is None:
        return float(blocks * one.block_bytes)
    lacking: Column = depths.take(pool.slots, mode="wrap")
    np.subtract(blocks, lacking, out=lacking)
    np.maximum(lacking, 0.0, out=lacking)
    lacking *= one.block_bytes
    return lacking


def _without_excluded(scores: Column, pool: Pool, request: RouteRequest) -> Column:
    for key in request.exclude:
        if (row := pool.place.get(key)) is not None:
            scores[row] = np.inf
    return scores


def _least_pair(
    p_score: Column, d_score: Column, bytes_lacking: Column | float, prefill: PrefillRows, turn: int
) -> _Best:
    """Looks at all pairs of one prefill worker after the other, the best one first, until none can do better."""
    bounds = prefill.least_byte_s * bytes_lacking
    bounds += d_score
    least_decode_s = float(bounds[bounds.argmin()])
    best = _Best()
    for looked_at in range(len(p_score)):
        row = _first_least(p_score, turn)
        p_s = float(p_score[row])
        if p_s + least_decode_s >= best.total_s or p_s == np.inf:
            break
        if looked_at >= MAX_ROWS and best.prefill >= 0:
            break
        totals = prefill.byte_s[row] * bytes_lacking
        totals += d_score
        if not prefill.reaches_all[row]:
            totals += prefill.unreached[row]
        column = _first_least(totals, turn)
        total_s = p_s + float(totals[column])
        if total_s < best.total_s:
            best = _Best(total_s, row, column)
        p_score[row] = np.inf
    return best


def _first_least(scores: Column, turn: int) -> int:
    """Where the least is; of several equals, the first from position `turn` on, around the end."""
    first, start = int(scores.argmin()), turn % len(scores)
    if first >= start:
        return first
    later = start + int(scores[start:].argmin())
    return later if scores[later] == scores[first] else first


def _pair(
    prefills: PrefillRows, row: int, decodes: DecodeRows | None, column: int, request: RouteRequest
) -> Pair:
    prefill, rate = prefills.workers[row], 1 / float(prefills.token_s[row])
    if decodes is None:
        parts = pair_cost(prefill, None, request, rate, 0.0, 0.0, _others_token_s(prefills))
        return Pair(prefill, None, parts.queue_s + parts.prefill_s, parts)
    decode = decodes.workers[column]
    byte_s, step_s = float(prefills.byte_s[row, column]), float(decodes.step_s[column])
    parts = pair_cost(prefill, decode, request, rate, step_s, byte_s, _others_token_s(prefills))
    total_s = parts.queue_s + parts.prefill_s + parts.transfer_s + parts.decode_wait_s
    return Pair(prefill, decode, total_s, parts, decodes.ready_count)
