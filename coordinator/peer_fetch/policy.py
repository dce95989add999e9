"""When a worker gets a prefix from another one's cache in place of computing it, and from which. Pure.

A fetch is chosen where it is predicted to take at most `MARGIN` of the time that computing the same tokens takes.
Predicted are

    wait      half a step of the holder and one of the taker: their engines answer between steps
    lane      latency of the lane from holder to taker, as it was measured, and bytes over its speed
    the rest  calls, and what a lane carries beside a probe: a line through the fetches so far (`FetchMeter`)

and for computing the worker's own fit of prompt times, or its rate where there is none yet.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from coordinator.routing.prompt_placement import prompt_fit_of
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey
from splitserve.v1 import registry_pb2

MARGIN = 0.75
"""A prediction that is 25% too low still finds the prefix sooner than it would have been computed: 0.75 x 1.25 < 1."""
_GB = 1e9
_FIRST_OVERHEAD_S = 0.01
_PRIOR_LANE_S = (0.0, 0.1)
_PRIOR_WEIGHT = 0.2
"""Of each of the two made-up fetches, in measured ones."""
_DECAY = 0.95
_OUTLIER = 3.0
"""A fetch counts as at most so many times as long as predicted."""
_SLOPES = (0.25, 8.0)


class FetchMeter:
    """A line through measured fetches: seconds beside the waits for steps, over the seconds that the lane alone takes.

    Exponentially weighted least squares; it begins with a made-up line of 10 ms and the lane's own speed.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for lane_s in _PRIOR_LANE_S:
            self._add(lane_s, _FIRST_OVERHEAD_S + lane_s, _PRIOR_WEIGHT)

    def predicted_s(self, lane_s: float) -> float:
        """Seconds of a fetch that the lane alone carries in `lane_s`, without waits for steps."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-12 else 1.0
        slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
        return max(mean_y + slope * (lane_s - mean_x), lane_s * _SLOPES[0])

    def record(self, lane_s: float, took_s: float) -> None:
        """Takes a fetch that took `took_s` beside the predicted waits for steps."""
        took_s = min(max(took_s, 0.0), _OUTLIER * self.predicted_s(lane_s))
        self._n, self._x, self._y = self._n * _DECAY, self._x * _DECAY, self._y * _DECAY
        self._xx, self._xy = self._xx * _DECAY, self._xy * _DECAY
        self._add(lane_s, took_s)

    def _add(self, x: float, y: float, weight: float = 1.0) -> None:
        self._n, self._x, self._y = self._n + weight, self._x + weight * x, self._y + weight * y
        self._xx, self._xy = self._xx + weight * x * x, self._xy + weight * x * y


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """A prefix that `taker` gets from the cache of `holder`. Times in seconds, predicted."""

    holder: Worker
    taker: Worker
    tokens: int
    """Leading tokens of the prompt that the taker then has."""
    held_tokens: int
    """Those that it is expected to have before."""
    lane_s: float
    wait_s: float
    fetch_s: float
    """All of the fetch, the two before included."""
    compute_s: float
    """Computing the same tokens, which is also how long the fetch may take."""


def plan_fetch(
    snapshot: PoolSnapshot,
    taker: Worker,
    prompt_tokens: int,
    expected: PrefixHits,
    confirmed: PrefixHits,
    meter: FetchMeter,
    model: str,
    resting: Container[tuple[WorkerKey, WorkerKey]] = (),
) -> FetchPlan | None:
    """The fetch that spares the most time; None if none is predicted to be sooner than computing by `MARGIN`.

    `expected` are the hits of the prompt with what is being computed now, `confirmed` those without: what a holder has
    yet to compute it cannot send. Pairs of holder and taker that are `resting` are left alone.
    """
    if not taker.decodes:  # it gives no tickets
        return None
    held = min(expected.blocks(taker.prefix_slot) * taker.block_size_tokens, prompt_tokens - 1)
    plans = (
        _plan(holder, taker, prompt_tokens, held, confirmed, meter)
        for holder in holders(snapshot, taker, model)
        if (holder.key, taker.key) not in resting
    )
    good = [plan for plan in plans if plan is not None and plan.fetch_s <= MARGIN * plan.compute_s]
    return max(good, key=lambda plan: plan.compute_s - plan.fetch_s, default=None)


def holders(snapshot: PoolSnapshot, taker: Worker, model: str) -> Iterable[Worker]:
    """Workers that could send blocks to the taker: connected to it, and neither draining nor put aside."""
    return (
        worker
        for worker in snapshot.workers
        if worker.computes_prompts
        and worker.serves(model)
        and worker.usable
        and not worker.isolation.worker
        and not worker.circuit.tripped
        and worker.key != taker.key
        and taker.agent_id in worker.reached_agents
    )


def whole_tokens(tokens: int, holder: Worker, taker: Worker) -> int:
    """How many of `tokens` leading tokens are whole blocks of both workers. One block size divides the other."""
    size = max(holder.block_size_tokens, taker.block_size_tokens, 1)
    return tokens // size * size


def lane_seconds(holder: Worker, taker: Worker, tokens: int) -> float | None:
    """Seconds in which the lane alone carries the KV of `tokens`; None if it is not measured, or refused."""
    lane = next((lane for lane in holder.lanes if lane.agent_id == taker.agent_id), None)
    if lane is None or lane.refused or lane.gb_per_second <= 0:
        return None
    size = tokens / max(1, taker.block_size_tokens) * taker.block_bytes
    return lane.latency_ms / 1e3 + size / (lane.gb_per_second * _GB)


def compute_seconds(worker: Worker, tokens: int, context_tokens: int) -> float | None:
    """Seconds in which a worker computes `tokens` after `context_tokens`; None before it has measured."""
    load = worker.load
    if load.HasField("prompt_fit"):
        fit, most = prompt_fit_of(load.prompt_fit), worker.max_step_tokens or tokens
        # The step that computes the rest of the prompt is needed in any case.
        return fit.chunk_s(tokens, context_tokens) + (tokens // max(1, most) - 1) * fit.base_s
    return tokens / load.prefill_tokens_per_second if load.prefill_tokens_per_second else None


def _plan(
    holder: Worker, taker: Worker, prompt_tokens: int, held: int, confirmed: PrefixHits, meter: FetchMeter
) -> FetchPlan | None:
    has = confirmed.blocks(holder.prefix_slot) * holder.block_size_tokens
    tokens = whole_tokens(min(has, prompt_tokens - 1), holder, taker)
    load = taker.load
    if tokens <= held or load.running_requests >= taker.max_running_requests:
        return None
    if load.free_blocks * taker.block_size_tokens < tokens - held:  # it would wait for its reservation
        return None
    lane_s, more = lane_seconds(holder, taker, tokens - held), tokens - held
    # A new worker is taken to be as fast as the other.
    compute_s = compute_seconds(taker, more, held) or compute_seconds(holder, more, held)
    if lane_s is None or compute_s is None:
        return None
    wait_s = _step_s(holder.load, holder) / 2 + _step_s(taker.load, taker)
    return FetchPlan(
        holder, taker, tokens, held, lane_s, wait_s, wait_s + meter.predicted_s(lane_s), compute_s
    )


def _step_s(load: registry_pb2.WorkerLoad, worker: Worker) -> float:
    """Seconds of the step that a worker is in; 0 where it has nothing to do."""
    step_s = load.decode_step_ms / 1e3 if load.running_requests else 0.0
    if load.waiting_tokens and load.prefill_tokens_per_second:
        chunk = min(load.waiting_tokens, worker.max_step_tokens or load.waiting_tokens)
        step_s += chunk / load.prefill_tokens_per_second
    return step_s
