"""Who serves a request: what every policy takes and gives, and the two that know nothing of caches. Pure.

`coordinator.prefix_router` holds the policy that is used unless the settings name another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.pools import PoolName, PoolSnapshot, Worker, WorkerKey
from coordinator.prefix_hits import NO_HITS, PrefixHits
from coordinator.route_scores import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DEFAULT_STEP_S,
    TYPICAL_OUTPUT_TOKENS,
    decode_score_s,
    prefill_score_s,
)
from splitserve.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing knows of a request."""

    model: str
    prompt_tokens: int
    """Tokens to be computed: the prompt, and on a resume the tokens already emitted."""
    needs_decode: bool = True
    """False when the answer ends with the token that prefill samples."""
    exclude: frozenset[WorkerKey] = frozenset()
    """Boots that failed this request."""
    turn: int = 0
    """A running number; it decides between equals, so that they take turns."""
    hits: PrefixHits = NO_HITS
    """How much of the prompt each worker is known to hold."""
    expected_output_tokens: float = TYPICAL_OUTPUT_TOKENS
    """How long the answer will be, as far as it is known."""
    session_id: str = ""
    """Requests of one session tend to the same workers; empty: none."""
    priority: int = 0
    """-100..100; higher ones overtake what waits at a worker, lower ones are overtaken."""


def cached_tokens(worker: Worker, request: RouteRequest) -> int:
    """Leading prompt tokens that a worker need not compute; the last one it always must, for its logits."""
    return min(request.hits.blocks(worker.prefix_slot) * worker.block_size_tokens, request.prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class RouteParts:
    """What a prediction is made of. Times in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    others_s: float = 0.0
    """What computing the prompt costs the requests behind it; no part of this one's time."""
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    cached_tokens: int = 0
    """Leading prompt tokens that the prefill worker should hold already."""
    decode_cached_tokens: int = 0
    """The same of the decode worker."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and, unless the request needs none, a decode worker that it can write to."""

    prefill: Worker
    decode: Worker | None
    predicted_wait_s: float
    parts: RouteParts = RouteParts()
    """Of `predicted_wait_s`, where the policy tells them."""
    decode_candidates: int = 1
    """Decode workers that take new requests of the model."""


class Router(Protocol):
    """A routing policy. Implementations neither await nor read clocks."""

    def choose_pair(self, snapshot: PoolSnapshot, request: RouteRequest, now: float) -> Pair | None:
        """The pair to use, or None when no complete one can serve the request now."""


class LeastWaitRouter:
    """Least sum of predicted prefill wait and decode wait over all connected pairs."""

    def choose_pair(self, snapshot: PoolSnapshot, request: RouteRequest, now: float) -> Pair | None:
        """See Router."""
        prefills = _turned(_candidates(snapshot, request, "prefill"), request.turn)
        rate = _pool_rate(prefills)
        ranked = sorted(((prefill_wait_s(w, request, rate), w) for w in prefills), key=lambda c: c[0])
        if not request.needs_decode:
            return Pair(ranked[0][1], None, ranked[0][0]) if ranked else None
        decodes = _turned(_candidates(snapshot, request, "decode"), request.turn)
        step_s = _pool_step_s(decodes)
        targets = sorted(((decode_wait_s(w, request, step_s), w) for w in decodes), key=lambda c: c[0])
        best: Pair | None = None
        for prefill_s, prefill in ranked:
            # Ranked order: once even the best decode worker cannot make up for it, nobody further can.
            if targets and best is not None and prefill_s + targets[0][0] >= best.predicted_wait_s:
                break
            reached = next(((wait_s, d) for wait_s, d in targets if prefill.reaches(d)), None)
            if reached is not None and (best is None or prefill_s + reached[0] < best.predicted_wait_s):
                best = Pair(prefill, reached[1], prefill_s + reached[0], decode_candidates=len(decodes))
        return best


class RoundRobinRouter:
    """Each worker in turn, whatever its load: to compare with, and to rule the policies out when debugging."""

    def choose_pair(self, snapshot: PoolSnapshot, request: RouteRequest, now: float) -> Pair | None:
        """See Router."""
        prefills = _turned(_candidates(snapshot, request, "prefill"), request.turn)
        if not request.needs_decode:
            return Pair(prefills[0], None, 0.0) if prefills else None
        decodes = _turned(_candidates(snapshot, request, "decode"), request.turn)
        for prefill in prefills:
            for decode in decodes:
                if prefill.reaches(decode):
                    return Pair(prefill, decode, 0.0, decode_candidates=len(decodes))
        return None


def prefill_wait_s(worker: Worker, request: RouteRequest, default_rate: float) -> float:
    """Time until this worker has computed the prompt, were it queued there now."""
    rate = worker.load.prefill_tokens_per_second or default_rate
    return prefill_score_s(worker.load.waiting_tokens + worker.sent_tokens, request.prompt_tokens, rate)


def decode_wait_s(worker: Worker, request: RouteRequest, default_step_s: float) -> float:
    """Time until this worker has room for the prompt's blocks, plus what its batch costs a step."""
    load = worker.load
    return decode_score_s(
        needed_blocks=_blocks(request.prompt_tokens + 1, worker),
        free_blocks=load.free_blocks - _blocks(worker.sent_tokens, worker),
        held_blocks=load.referenced_blocks + load.reserved_blocks,
        step_s=load.decode_step_ms / 1e3 or default_step_s,
        requests=load.running_requests
        + load.waiting_requests
        + load.waiting_reservations
        + worker.sent_requests,
        max_running_requests=worker.max_running_requests,
    )


def no_pair(snapshot: PoolSnapshot, request: RouteRequest, retry_after_s: float) -> UnavailableError:
    """Why no complete pair can serve the request: SLOW_LANE, the lane named, or NO_WORKER."""
    pools: tuple[PoolName, ...] = ("prefill", "decode") if request.needs_decode else ("prefill",)
    empty = [pool for pool in pools if not snapshot.accepting(request.model, pool)]
    reason = "NO_WORKER"
    if empty:
        message = f"no {' and no '.join(empty)} worker of model {request.model!r} is ready"
    elif refused := refused_lanes(snapshot, request.model):
        reason = "SLOW_LANE"
        message = f"model {request.model!r}: a lane is too slow (lane_policy: refuse): {refused}"
    else:
        message = f"no prefill worker of model {request.model!r} is connected to a decode worker"
    return UnavailableError(message, reason=reason, retry_after_s=retry_after_s)


def refused_lanes(snapshot: PoolSnapshot, model: str) -> str:
    """The pairs of a model that are not used because of their lanes, and why; empty when there are none."""
    return "; ".join(
        f"{worker.worker_id} to {peer.worker_id}: {lane.problem}"
        for worker in snapshot.accepting(model, "prefill")
        for peer, lane in snapshot.lanes_of(worker)
        if lane.refused
    )


def _candidates(snapshot: PoolSnapshot, request: RouteRequest, pool: PoolName) -> list[Worker]:
    return [w for w in snapshot.accepting(request.model, pool) if w.key not in request.exclude]


def _turned(workers: Sequence[Worker], turn: int) -> list[Worker]:
    # Sorting is stable, so the first of several equals in this order is taken.
    start = turn % len(workers) if workers else 0
    return [*workers[start:], *workers[:start]]


def _blocks(tokens: int, worker: Worker) -> int:
    return -(-tokens // worker.block_size_tokens)


def _pool_rate(workers: Sequence[Worker]) -> float:
    # A worker without a measurement counts as average: neither starved nor flooded.
    rates = [w.load.prefill_tokens_per_second for w in workers if w.load.prefill_tokens_per_second > 0]
    return sum(rates) / len(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S


def _pool_step_s(workers: Sequence[Worker]) -> float:
    steps = [w.load.decode_step_ms / 1e3 for w in workers if w.load.decode_step_ms > 0]
    return sum(steps) / len(steps) if steps else DEFAULT_STEP_S
