"""A neutral worker as both of a pair: what is left where no two workers can serve a request together. Pure.

It computes the prompt and keeps the answer, so that nothing is handed off. That is so where all workers lean to one
side, where only one is left, and where no lane is up.
"""

from __future__ import annotations

from coordinator.routing.router import Pair, RoutingRequest
from coordinator.routing.scores import pair_cost
from coordinator.workers.load import DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_STEP_S
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolSnapshot, Worker


def own_pair(snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest) -> Pair | None:
    """The neutral worker that would serve the request soonest, as a pair with itself; None if none takes requests."""
    able = [
        worker
        for worker in snapshot.workers
        if worker.neutral
        and worker.serves(request.model)
        and worker.accepts
        and worker.key not in request.exclude
    ]
    start = request.turn % len(able) if able else 0
    pairs = [_pair(worker, loads, request, len(able)) for worker in (*able[start:], *able[:start])]
    return min(pairs, key=lambda pair: pair.predicted_wait_s, default=None)


def _pair(worker: Worker, loads: LoadLedger, request: RoutingRequest, count: int) -> Pair:
    prefill, decode = loads.prefill[worker.key], loads.decode[worker.key]
    rate = prefill.measured_rate or DEFAULT_PREFILL_TOKENS_PER_S
    step_s = decode.measured_step_s or DEFAULT_STEP_S
    keeps = worker if request.needs_decode else None
    cost = pair_cost(worker, keeps, loads, request, rate, step_s, byte_s=0.0)
    return Pair(worker, keeps, cost.wait_s, cost, count, prefill.queued_tokens)
