"""Routing by predicted time to first token with prefix caches: the pair with the least cost. Pure.

The cost of a prefill worker p and a decode worker d is the sum of

    queue     tokens queued at p / its rate, weighted by class
    prefill   prompt tokens that p does not hold / its rate
    read      until p has read what it holds below its KV blocks, beyond the time of its queue; what is computed as soon
              counts as not held
    others    prompt tokens that p does not hold / the pool's mean rate, times `scores.crowding`: the delay for
              requests behind this one
    transfer  bytes of the prompt's blocks that d does not hold / speed of the lane from p to d; and until d has read
              those that it holds below its KV blocks, as far as that is sooner
    decode    wait for blocks at d, and the cost of a step in its batch (`scores.decode_score_s`); where d computes
              prompts in any case (`local_prefill: always`), also those that wait there / its rate

Queue, prefill and transfer are Mooncake's Algorithm 1 (Qin et al., FAST 2025); the other terms and the joint choice of
both workers are ours. docs/routing.md explains each term. `scores.pair_cost` computes the cost of one pair;
`PrefixRouter` computes the same for whole pools at once, and only for pairs of the most promising prefill workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coordinator.peer_fetch.prefix_offer import MARGIN, PrefixOffer
from coordinator.request.candidates import Candidate, PairCost
from coordinator.routing.own_pair import own_pair
from coordinator.routing.router import Pair, RoutingRequest
from coordinator.routing.scores import needed_blocks, pair_cost, queue_weight
from coordinator.routing.worker_columns import (
    Column,
    DecodeColumns,
    ModelColumns,
    PrefillColumns,
    Transfers,
    WorkerColumns,
)
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolSnapshot

HOME_SHARE = 0.25
"""Bonus of a session's home worker: this share of the time to compute the whole prompt, or of one decode step. A
quarter keeps a session in place while loads fluctuate, and moves it before it has to wait."""
MAX_PREFILL_CANDIDATES = 64
"""Prefill workers whose pairs are examined once a pair is found; usually one or two suffice for the exact answer."""
MAX_MODELS = 64
"""Models whose columns are kept."""
MAX_OTHERS = 2
"""Workers of each pool, beside the chosen one, among a pair's `candidates`."""
MAX_EXPLAINED_WORKERS = 256
"""Of one pool: beyond that, the lanes of all workers to the chosen one take longer to look at than the choice may."""


@dataclass(slots=True)
class _Best:
    total_s: float = float("inf")
    prefill: int = -1
    decode: int = -1


class PrefixRouter:
    """Chooses the pair of least predicted cost, with a bonus for a session's home; see the module docstring.

    Columns of the last snapshot are kept as a memo only: the result depends on the arguments alone.
    """

    def __init__(self) -> None:
        self._models: dict[str, ModelColumns] = {}

    def choose_pair(
        self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest, now: float
    ) -> Pair | None:
        """See Router."""
        pair = self._of_pools(snapshot, loads, request)
        return own_pair(snapshot, loads, request) if pair is None else pair

    def _of_pools(self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest) -> Pair | None:
        columns = self._columns(request.model)
        columns.refresh(snapshot, loads)
        prefill, decode = columns.prefill, columns.decode
        if not prefill.workers or (request.needs_decode and not decode.workers):
            return None
        width = max(prefill.width, decode.width)
        depths = request.hits.by_slot(width) if request.hits and width else None
        p_score = _prefill_scores(prefill, request, depths)
        explained = request.wants_candidates and (
            max(len(prefill.workers), len(decode.workers)) <= MAX_EXPLAINED_WORKERS
        )
        p_kept = p_score.copy() if explained else None  # the search overwrites it
        if not request.needs_decode:
            first = _first_least(p_score, request.turn)
            if p_score[first] == np.inf:
                return None
            return _pair(loads, prefill, first, None, 0, request, p_kept, None)
        d_score, transfers = _decode_scores(decode, request), Transfers(decode, request.prompt_tokens, depths)
        best = _least_pair(p_score, d_score, transfers, prefill, request.turn)
        row, column = best.prefill, best.decode
        if row < 0:
            return None
        d_total: Column | None = None
        if p_kept is not None:
            d_total = transfers.seconds(prefill.byte_s[row]) + d_score + prefill.unreached[row]
            p_kept += transfers.seconds_to(column, prefill.byte_s[:, column]) + prefill.unreached[:, column]
        return _pair(loads, prefill, row, decode, column, request, p_kept, d_total)

    def _columns(self, model: str) -> ModelColumns:
        columns = self._models.get(model)
        if columns is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            columns = self._models[model] = ModelColumns(model)
        return columns


def _prefill_scores(pool: PrefillColumns, request: RoutingRequest, depths: Column | None) -> Column:
    """Queue, prefill and others' delay of each prefill worker, in seconds, up to a common constant; float64 [workers].

    Infinite for workers that must not be used. `depths` are cached leading blocks by slot, float64 [slots + 1].
    """
    scores: Column = pool.token_s * request.prompt_tokens
    scores += pool.queue_s if not request.class_rank else pool.queue_s * queue_weight(request.class_rank)
    held: Column | float = 0.0
    if depths is not None:
        size = pool.block_size
        blocks = depths.take(pool.slots, mode="wrap")
        np.minimum(blocks, (request.prompt_tokens - 1) / size, out=blocks)
        if pool.tiers is not None:
            below = pool.tiers.brought(blocks, depths, pool.token_s * size)
            blocks -= below.lacking
            queue_s = pool.queue_s * queue_weight(request.class_rank)
            scores += np.maximum(below.read_s - queue_s, 0.0)
        # Others' delay is counted as a saving relative to the whole prompt, which shifts all scores alike.
        saved_s = pool.token_s + _others_token_s(pool)
        saved_s *= size
        saved_s *= blocks
        scores -= saved_s
        held = blocks * size
    if request.offer is not None:
        scores -= _saved_by_fetch_s(pool, request.offer, held)
    if request.session_id:
        home = pool.home(request.session_id)
        scores[home] -= HOME_SHARE * request.prompt_tokens * pool.token_s[home]
    return _without_excluded(scores, pool, request)


def _saved_by_fetch_s(pool: PrefillColumns, offer: PrefixOffer, held: Column | float) -> Column:
    """What each worker, which holds so many tokens, is sooner if it fetches what is offered, others' delay included."""
    token_s, latency_s = pool.lane_from(offer)
    missing = np.maximum(offer.tokens - held, 0.0)
    fetch_s = offer.fixed_s + offer.pace * (latency_s + token_s * missing)
    is_sooner = (missing > 0) & (fetch_s <= MARGIN * pool.token_s * missing)
    return np.where(is_sooner, (pool.token_s + _others_token_s(pool)) * missing - fetch_s, 0.0)


def _others_token_s(pool: PrefillColumns) -> float:
    # At the pool's mean rate: a worker's own rate fluctuates with its recent prompts, and crowding amplifies that.
    return pool.crowded * pool.mean_token_s


def _decode_scores(pool: DecodeColumns, request: RoutingRequest) -> Column:
    """Wait and step cost of each decode worker, in seconds, float64 [workers]; infinite for those not to be used."""
    needed = needed_blocks(request, pool.block_size)
    scores: Column
    if isinstance(needed, float) and needed <= pool.free[pool.free.argmin()]:
        scores = pool.batch_s.copy()
    else:
        scores = needed - pool.free
        np.maximum(scores, 0.0, out=scores)
        scores *= pool.block_s
        scores *= request.expected_output_tokens
        scores += pool.batch_s
    if request.computed_at_decode:
        scores += pool.prompts_s * queue_weight(request.class_rank)
    if request.session_id:
        home = pool.home(request.session_id)
        scores[home] -= HOME_SHARE * pool.step_s[home]
    return _without_excluded(scores, pool, request)


def _without_excluded(scores: Column, pool: WorkerColumns, request: RoutingRequest) -> Column:
    for key in request.exclude:
        if (row := pool.row_of.get(key)) is not None:
            scores[row] = np.inf
    return scores


def _least_pair(
    p_score: Column, d_score: Column, transfers: Transfers, prefill: PrefillColumns, turn: int
) -> _Best:
    """The pair of least total: examines prefill workers from the best score on until no other can do better.

    `p_score` is float64 [prefill workers] and is overwritten; `d_score` is [decode workers].
    """
    bounds = transfers.seconds(prefill.least_byte_s)
    bounds += d_score
    least_decode_s = float(bounds[bounds.argmin()])
    best = _Best()
    for looked_at in range(len(p_score)):
        row = _first_least(p_score, turn)
        p_s = float(p_score[row])
        if p_s + least_decode_s >= best.total_s or p_s == np.inf:
            break
        if looked_at >= MAX_PREFILL_CANDIDATES and best.prefill >= 0:
            break
        totals = transfers.seconds(prefill.byte_s[row])
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
    """Index of the least score; ties go to the first from position `turn` on, wrapping around."""
    first, start = int(scores.argmin()), turn % len(scores)
    if first >= start:
        return first
    later = start + int(scores[start:].argmin())
    return later if scores[later] == scores[first] else first


def _candidates(
    loads: LoadLedger,
    prefills: PrefillColumns,
    row: int,
    decodes: DecodeColumns | None,
    column: int,
    request: RoutingRequest,
    chosen: PairCost,
    p_total: Column | None,
    d_total: Column | None,
) -> tuple[Candidate, ...]:
    """See `Pair.candidates`; empty without totals. `chosen` is the cost of the pair at `row` and `column`.

    `p_total` is float64 [prefill workers], each with the chosen decode worker, `d_total` float64 [decode workers], each
    with the chosen prefill worker. Both are overwritten.
    """
    found: list[Candidate] = []
    if p_total is not None:

        def with_prefill(other: int) -> PairCost:
            return _cost(loads, prefills, other, decodes, column, request)

        found += _of_pool(prefills, p_total, row, chosen, with_prefill, request)
    if d_total is not None and decodes is not None:

        def with_decode(other: int) -> PairCost:
            return _cost(loads, prefills, row, decodes, other, request)

        found += _of_pool(decodes, d_total, column, chosen, with_decode, request)
    return tuple(found)


def _of_pool(
    pool: WorkerColumns,
    totals: Column,
    chosen: int,
    chosen_cost: PairCost,
    cost_of: Callable[[int], PairCost],
    request: RoutingRequest,
) -> list[Candidate]:
    """The chosen worker of a pool and up to MAX_OTHERS next best. `totals` are float64 [workers] and overwritten."""
    home = pool.home(request.session_id) if request.session_id else -1
    costs = [(chosen, chosen_cost), *((other, cost_of(other)) for other in _next_least(totals, chosen))]
    return [
        Candidate(pool.workers[at].worker_id, pool.workers[at].pool, cost, at == home) for at, cost in costs
    ]


def _next_least(totals: Column, chosen: int) -> list[int]:
    """Indices of up to MAX_OTHERS least finite totals without `chosen`, the least first. Overwrites them."""
    totals[chosen] = np.inf
    others: list[int] = []
    for _ in range(min(MAX_OTHERS, len(totals) - 1)):
        index = int(totals.argmin())
        if totals[index] == np.inf:
            break
        others.append(index)
        totals[index] = np.inf
    return others


def _cost(
    loads: LoadLedger,
    prefills: PrefillColumns,
    row: int,
    decodes: DecodeColumns | None,
    column: int,
    request: RoutingRequest,
) -> PairCost:
    prefill, rate, others = prefills.workers[row], 1 / float(prefills.token_s[row]), _others_token_s(prefills)
    if decodes is None:
        return pair_cost(prefill, None, loads, request, rate, 0.0, 0.0, others)
    byte_s, step_s = float(prefills.byte_s[row, column]), float(decodes.step_s[column])
    return pair_cost(prefill, decodes.workers[column], loads, request, rate, step_s, byte_s, others)


def _pair(
    loads: LoadLedger,
    prefills: PrefillColumns,
    row: int,
    decodes: DecodeColumns | None,
    column: int,
    request: RoutingRequest,
    p_total: Column | None,
    d_total: Column | None,
) -> Pair:
    prefill = prefills.workers[row]
    cost = _cost(loads, prefills, row, decodes, column, request)
    return Pair(
        prefill,
        decodes.workers[column] if decodes is not None else None,
        cost.wait_s,
        cost,
        decodes.ready_count if decodes is not None else 1,
        loads.prefill[prefill.key].queued_tokens,
        _candidates(loads, prefills, row, decodes, column, request, cost, p_total, d_total),
    )
