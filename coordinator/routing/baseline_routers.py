"""The two routing policies that ignore prefix caches: least predicted wait, and round robin. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from coordinator.routing.own_pair import own_pair
from coordinator.routing.router import Pair, RoutingRequest
from coordinator.routing.scores import decode_score_s, prefill_score_s
from coordinator.workers.load import DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_STEP_S, DecodeLoad, PrefillLoad
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker

_WAIT = itemgetter(0)


class LeastWaitRouter:
    """Least sum of predicted prefill wait and decode wait over all connected pairs."""

    def choose_pair(
        self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest, now: float
    ) -> Pair | None:
        """See Router."""
        pair = self._of_pools(snapshot, loads, request)
        return own_pair(snapshot, loads, request) if pair is None else pair

    def _of_pools(self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest) -> Pair | None:
        prefills = _turned(_candidates(snapshot, request, "prefill"), request.turn)
        p_loads, d_loads = loads.prefill, loads.decode
        rate = _mean([p_loads[w.key].measured_rate for w in prefills], DEFAULT_PREFILL_TOKENS_PER_S)
        ranked = sorted(((prefill_wait_s(p_loads[w.key], request, rate), w) for w in prefills), key=_WAIT)
        if not request.needs_decode:
            return _paired(ranked[0][1], None, ranked[0][0], loads) if ranked else None
        decodes = _turned(_candidates(snapshot, request, "decode"), request.turn)
        step_s = _mean([d_loads[w.key].measured_step_s for w in decodes], DEFAULT_STEP_S)
        targets = sorted(((decode_wait_s(d_loads[w.key], request, step_s), w) for w in decodes), key=_WAIT)
        best: Pair | None = None
        for prefill_s, prefill in ranked:
            # Sorted by prefill wait: once even the best decode worker cannot make up for it, no later one can.
            if targets and best is not None and prefill_s + targets[0][0] >= best.predicted_wait_s:
                break
            reached = next(((wait_s, d) for wait_s, d in targets if prefill.reaches(d)), None)
            if reached is not None and (best is None or prefill_s + reached[0] < best.predicted_wait_s):
                best = _paired(prefill, reached[1], prefill_s + reached[0], loads, len(decodes))
        return best


class RoundRobinRouter:
    """Each worker in turn, whatever its load: a baseline, and a way to rule out routing when debugging."""

    def choose_pair(
        self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest, now: float
    ) -> Pair | None:
        """See Router."""
        pair = self._of_pools(snapshot, loads, request)
        return own_pair(snapshot, loads, request) if pair is None else pair

    def _of_pools(self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest) -> Pair | None:
        prefills = _turned(_candidates(snapshot, request, "prefill"), request.turn)
        if not request.needs_decode:
            return _paired(prefills[0], None, 0.0, loads) if prefills else None
        decodes = _turned(_candidates(snapshot, request, "decode"), request.turn)
        for prefill in prefills:
            for decode in decodes:
                if prefill.reaches(decode):
                    return _paired(prefill, decode, 0.0, loads, len(decodes))
        return None


def prefill_wait_s(load: PrefillLoad, request: RoutingRequest, default_rate: float) -> float:
    """Seconds until this worker would have computed the prompt if it were queued there now."""
    return prefill_score_s(load.queued_tokens, request.prompt_tokens, load.measured_rate or default_rate)


def decode_wait_s(load: DecodeLoad, request: RoutingRequest, default_step_s: float) -> float:
    """Seconds until this worker has room for the prompt's blocks, plus the cost of a step in its batch."""
    return decode_score_s(
        needed_blocks=-(-(request.prompt_tokens + 1) // load.block_size),
        free_blocks=load.free_blocks,
        held_blocks=load.held_blocks,
        step_s=load.measured_step_s or default_step_s,
        requests=load.batch_requests,
        max_running_requests=load.slots,
    )


def _turned(workers: Sequence[Worker], turn: int) -> list[Worker]:
    # Sorting is stable, so ties go to the first worker in this rotated order.
    start = turn % len(workers) if workers else 0
    return [*workers[start:], *workers[:start]]


def _candidates(snapshot: PoolSnapshot, request: RoutingRequest, pool: PoolName) -> list[Worker]:
    return [w for w in snapshot.accepting(request.model, pool) if w.key not in request.exclude]


def _paired(
    prefill: Worker, decode: Worker | None, wait_s: float, loads: LoadLedger, candidates: int = 1
) -> Pair:
    queued_tokens = loads.prefill[prefill.key].queued_tokens
    return Pair(prefill, decode, wait_s, decode_candidates=candidates, queued_tokens=queued_tokens)


def _mean(speeds: Sequence[float], default: float) -> float:
    # A worker without a measurement counts as average, so that it is neither starved nor flooded.
    measured = [speed for speed in speeds if speed > 0]
    return sum(measured) / len(measured) if measured else default
