"""Routing by predicted time to first token with prefix caches: the pair with the least cost. Pure.

The cost of a prefill worker p and a decode worker d is the sum of

    queue     tokens queued at p / its rate, weighted by class
    prefill   prompt tokens that p does not hold / its rate
    others    prompt tokens that p does not hold / the pool's mean rate, times `crowding`: the delay for requests
              behind this one
    transfer  bytes of the prompt's blocks that d does not hold / speed of the lane from p to d
    decode    wait for blocks at d, and the cost of a step in its batch; if decode workers compute all prompts, also the
              time for the prompts that wait at d

Queue, prefill and transfer are Mooncake's Algorithm 1 (Qin et al., FAST 2025); the other terms and the joint choice of
both workers are ours. docs/guides/routing.md explains each term. The terms are computed for whole pools at once, and
their sums only for pairs of the most promising prefill workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from coordinator.request.state import Candidate, PairCost
from coordinator.routing.router import Pair, Router, RoutingRequest
from coordinator.routing.worker_columns import (
    Column,
    DecodeColumns,
    ModelColumns,
    PrefillColumns,
    WorkerColumns,
)
from coordinator.workers.load import WorkerLoads
from coordinator.workers.snapshot import PoolSnapshot, Worker

HOME_SHARE = 0.25
"""Bonus of a session's home worker: this share of the time to compute the whole prompt, or of one decode step. A
quarter keeps a session in place while loads fluctuate, and moves it before it has to wait."""
MAX_PREFILL_CANDIDATES = 64
"""Most prefill workers whose pairs are examined once a pair is found; usually one or two give the exact answer."""
MAX_MODELS = 64
"""Models whose columns are kept."""
MAX_OTHERS = 2
"""Workers of each pool, beside the chosen one, among a pair's `candidates`."""
MAX_EXPLAINED_WORKERS = 256
"""Largest pool for which candidates are computed: with more workers the lanes to the chosen one take too long."""


@dataclass(slots=True)
class _Best:
    total_s: float = float("inf")
    prefill: int = -1
    decode: int = -1


@dataclass(frozen=True, slots=True)
class _Ends:
    """The decode workers at the ends of a request's handoffs: the wait at each, in seconds, and the bytes of KV that it
    lacks; each float64 [workers]."""

    columns: DecodeColumns
    wait_s: Column
    lacking: Column


class PrefixRouter(Router):
    """Chooses the pair of least predicted cost, with a bonus for a session's home; see the module docstring.

    Columns of the last snapshot are kept as a cache: the result depends only on the arguments.
    """

    def __init__(self) -> None:
        self._models: dict[str, ModelColumns] = {}

    @override
    def choose_pair(self, snapshot: PoolSnapshot, loads: WorkerLoads, request: RoutingRequest) -> Pair | None:
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
        p_kept = p_score.copy() if explained else None  # the search overwrites `p_score`
        if not request.needs_decode:
            first = _first_least(p_score, request.turn)
            if p_score[first] == np.inf:
                return None
            return _pair(request, prefill, first, None, 0, p_kept, None)
        ends = _Ends(
            decode, _decode_waits(decode, request), decode.bytes_lacking(request.prompt_tokens, depths)
        )
        d_score = _decode_scores(ends, request)
        best = _least_pair(p_score, d_score, ends.lacking, prefill, request.turn)
        row, column = best.prefill, best.decode
        if row < 0:
            return None
        d_total: Column | None = None
        if p_kept is not None:
            d_total = prefill.byte_s[row] * ends.lacking + d_score + prefill.unreached[row]
            p_kept += prefill.byte_s[:, column] * ends.lacking[column] + prefill.unreached[:, column]
        return _pair(request, prefill, row, ends, column, p_kept, d_total)

    def _columns(self, model: str) -> ModelColumns:
        columns = self._models.get(model)
        if columns is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            columns = self._models[model] = ModelColumns(model)
        return columns


def _queue_weight(class_rank: int) -> float:
    """Share of a queue that a request of this class waits for, since it overtakes requests of lower classes."""
    return float(2.0**-class_rank)


def _prefill_scores(pool: PrefillColumns, request: RoutingRequest, depths: Column | None) -> Column:
    """Queue, prefill and others' delay of each prefill worker, in seconds, up to a common constant; float64 [workers].

    Infinite for workers that must not be used. `depths` are cached leading blocks by slot, float64 [slots + 1].
    """
    scores: Column = pool.token_s * request.prompt_tokens + pool.queue_s * _queue_weight(request.class_rank)
    if depths is not None:
        blocks = depths.take(pool.slots, mode="wrap")
        held = np.minimum(blocks * pool.block_size, request.prompt_tokens - 1)
        # Others' delay is counted as a saving relative to the whole prompt, which shifts all scores alike.
        scores -= held * (pool.token_s + _others_token_s(pool))
    if request.session_id:
        home = pool.home(request.session_id)
        scores[home] -= HOME_SHARE * request.prompt_tokens * pool.token_s[home]
    return _without_excluded(scores, pool, request)


def _others_token_s(pool: PrefillColumns) -> float:
    # At the pool's mean rate: a worker's own rate fluctuates with its recent prompts, and crowding amplifies that.
    return pool.crowded * pool.mean_token_s


def _decode_waits(pool: DecodeColumns, request: RoutingRequest) -> Column:
    """Wait and step cost of each decode worker, in seconds, float64 [workers]; infinite for those not accepting.

    Missing blocks become free as running sequences end: each holds its share of the blocks held, and has about as many
    steps left as the request expects. The batch counts as one step, stretched by its fill, so that an emptier worker
    wins while there is room.
    """
    # For the prompt and its expected output.
    needed = (request.prompt_tokens + 1 + request.expected_output_tokens) // pool.block_size + 1.0
    missing = np.maximum(needed - pool.free, 0.0)
    waits: Column = missing * pool.block_s * request.expected_output_tokens + pool.batch_s
    if request.is_local:
        waits += pool.prompts_s
    return waits


def _decode_scores(ends: _Ends, request: RoutingRequest) -> Column:
    """The waits, less the bonus of a session's home, float64 [workers]; infinite for workers not to be used."""
    pool, scores = ends.columns, ends.wait_s.copy()
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
    p_score: Column, d_score: Column, lacking: Column, prefill: PrefillColumns, turn: int
) -> _Best:
    """The pair of least total: examines prefill workers from the best score on until no other can do better.

    `p_score` is float64 [prefill workers] and is overwritten; `d_score` and `lacking`, the bytes of KV to transfer, are
    [decode workers].
    """
    least_decode_s = float((prefill.least_byte_s * lacking + d_score).min())
    best = _Best()
    for looked_at in range(len(p_score)):
        row = _first_least(p_score, turn)
        p_s = float(p_score[row])
        if p_s + least_decode_s >= best.total_s or p_s == np.inf:
            break
        if looked_at >= MAX_PREFILL_CANDIDATES and best.prefill >= 0:
            break
        totals = prefill.byte_s[row] * lacking + d_score + prefill.unreached[row]
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
    pool: WorkerColumns, totals: Column, chosen: int, costs: Callable[[int], PairCost], session_id: str
) -> list[Candidate]:
    """The chosen worker of a pool and up to MAX_OTHERS next best ones. `costs` returns the cost of a row's worker
    paired with the chosen worker of the other pool; `totals`, float64 [workers], has their sums and is overwritten."""
    home, rows = pool.home(session_id) if session_id else -1, [chosen]
    while len(rows) <= MAX_OTHERS:
        totals[rows[-1]] = np.inf
        row = int(totals.argmin())
        if totals[row] == np.inf:
            break
        rows.append(row)
    return [Candidate(pool.workers[row].worker_id, pool.name, costs(row), row == home) for row in rows]


def _cost(
    request: RoutingRequest, prefills: PrefillColumns, row: int, ends: _Ends | None, column: int
) -> PairCost:
    """The predicted cost of the pair at `row` and `column`; without `ends`, of the prefill worker alone."""
    worker, token_s = prefills.workers[row], float(prefills.token_s[row])
    # The last token is always computed, for its logits.
    cached = min(_held_tokens(worker, request), request.prompt_tokens - 1)
    uncached = request.prompt_tokens - cached
    queue_s = float(prefills.queue_s[row]) * _queue_weight(request.class_rank)
    others_s = uncached * _others_token_s(prefills)
    if ends is None:
        return PairCost(queue_s, uncached * token_s, others_s, cached_tokens=cached)
    return PairCost(
        queue_s,
        uncached * token_s,
        others_s,
        transfer_s=float(prefills.byte_s[row, column] * ends.lacking[column]),
        decode_wait_s=float(ends.wait_s[column]),
        cached_tokens=cached,
        decode_cached_tokens=min(_held_tokens(ends.columns.workers[column], request), request.prompt_tokens),
    )


def _held_tokens(worker: Worker, request: RoutingRequest) -> int:
    """Tokens of the leading blocks that a worker caches."""
    return request.hits.blocks(worker.prefix_slot) * worker.block_size_tokens


def _pair(
    request: RoutingRequest,
    prefills: PrefillColumns,
    row: int,
    ends: _Ends | None,
    column: int,
    p_total: Column | None,
    d_total: Column | None,
) -> Pair:
    """The pair at `row` and `column`, with candidates of the pools whose totals are given; totals are overwritten."""

    def cost(row: int, column: int) -> PairCost:
        return _cost(request, prefills, row, ends, column)

    chosen, candidates = cost(row, column), list[Candidate]()
    if p_total is not None:
        candidates += _candidates(
            prefills, p_total, row, lambda at: chosen if at == row else cost(at, column), request.session_id
        )
    if d_total is not None and ends is not None:
        candidates += _candidates(
            ends.columns,
            d_total,
            column,
            lambda at: chosen if at == column else cost(row, at),
            request.session_id,
        )
    decode = ends.columns.workers[column] if ends is not None else None
    return Pair(prefills.workers[row], decode, chosen, tuple(candidates))
