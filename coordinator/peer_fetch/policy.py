"""When a worker gets a prefix from another one's cache in place of computing it, and from which. Pure.

A fetch is chosen where it is predicted to take at most `MARGIN` of the time that computing the same tokens takes.
Predicted are

    wait      half a step of the holder and one of the taker: their engines answer between steps; and fetches that keep
              their lanes busy still
    read      what the holder reads into its KV blocks before: it may be asked for what lies there, or for that and what
              is in its host memory, or on its disk
    lane      latency of the lane from holder to taker, as it was measured, and bytes over its speed
    the rest  calls, and how much slower than its probe the lane is: by `FetchTimes`

and for computing the worker's own fit of prompt times, or its rate where there is none yet. A fetch under way that
brings the same blocks is waited for where that is sooner than another one, and by `MARGIN` sooner than computing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from coordinator.peer_fetch.fetch_times import FetchTimes
from coordinator.peer_fetch.prefix_offer import MARGIN, PrefixOffer, has_room, lane_seconds
from coordinator.peer_fetch.under_way import FetchesUnderWay, UnderWay
from coordinator.routing.prompt_placement import prompt_fit_of
from coordinator.workers.load import DEFAULT_PREFILL_TOKENS_PER_S
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.prefix_index.tier_reads import Near, near_slots, nearness
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey
from splitserve.generation.kv_blocks import BlockKeys

NO_WORKER: WorkerKey = ("", 0)
"""A taker that is not chosen yet."""
_LEAST_LEFT = 0.1
"""Of what was predicted for a fetch under way: what is left of it where it is late."""


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
    """By its probe,"""
    pace: float
    """of which it is taken to need so many times."""
    wait_s: float
    """For steps, lanes, and what the holder reads."""
    fetch_s: float
    """All of the fetch, lane and wait included; of one under way what is left."""
    compute_s: float
    """Computing the same tokens, which is also how long the fetch may take."""
    joined: UnderWay | None = None
    """The fetch under way that brings these blocks; None: it is yet to begin."""

    @property
    def spares_s(self) -> float:
        """What it is sooner than computing."""
        return self.compute_s - self.fetch_s


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt whose prefix a worker may get from elsewhere."""

    taker: Worker
    prompt_tokens: int
    keys: BlockKeys
    expected: PrefixHits
    """With what is being computed or fetched now,"""
    confirmed: PrefixHits
    """and without: what a holder has yet to compute it cannot send."""
    model: str

    @property
    def most_tokens(self) -> int:
        """The last token of a prompt is always computed."""
        return self.prompt_tokens - 1

    @property
    def held_below(self) -> int:
        """Leading tokens that the taker has in lower tiers only."""
        depth, pool = (
            self.confirmed.blocks(at) for at in (self.taker.prefix_slot, near_slots(self.taker)[1])
        )
        return max(
            0,
            min(depth * self.taker.block_size_tokens, self.most_tokens) - pool * self.taker.block_size_tokens,
        )

    def held_tokens(self, hits: PrefixHits) -> int:
        """Leading tokens that the taker has by these hits."""
        return min(hits.blocks(self.taker.prefix_slot) * self.taker.block_size_tokens, self.most_tokens)


def plan_fetch(
    snapshot: PoolSnapshot,
    wanted: Wanted,
    times: FetchTimes,
    under_way: FetchesUnderWay,
    now: float,
    resting: Container[tuple[WorkerKey, WorkerKey]] = (),
) -> FetchPlan | None:
    """The fetch that spares the most time; None if none is predicted to be sooner than computing by `MARGIN`.

    Pairs of holder and taker that are `resting` are left alone.
    """
    taker = wanted.taker
    if not taker.takes_prefixes:  # it gives no tickets
        return None
    joins = [plan for fetch in under_way.at(taker.key) if (plan := _join(fetch, wanted, now)) is not None]
    # Blocks under way count as expected. Where a prompt does not wait for them, it has them not.
    held = wanted.held_tokens(wanted.confirmed if joins else wanted.expected)
    plans = [
        plan
        for holder in holders(snapshot, taker, wanted.model)
        if (holder.key, taker.key) not in resting
        for near in nearness(holder, wanted.confirmed)
        if (plan := _plan(holder, near, wanted, held, times, under_way, now)) is not None
    ]
    good = [plan for plan in (*joins, *plans) if plan.fetch_s <= MARGIN * plan.compute_s]
    return max(good, key=lambda plan: plan.spares_s, default=None)


def holders(snapshot: PoolSnapshot, taker: Worker, model: str) -> Iterable[Worker]:
    """Workers that could send blocks to the taker: connected to it, and neither draining nor put aside."""
    return (
        worker
        for worker in snapshot.workers
        if _sends(worker)
        and worker.serves(model)
        and worker.key != taker.key
        and taker.agent_id in worker.reached_agents
    )


def offer_of(
    snapshot: PoolSnapshot,
    prompt_tokens: int,
    confirmed: PrefixHits,
    times: FetchTimes,
    under_way: FetchesUnderWay,
    model: str,
    resting: Iterable[tuple[WorkerKey, WorkerKey]],
    now: float,
) -> PrefixOffer | None:
    """What the worker that holds most of a prompt could send to others, for who chooses among them: of what it would
    have to read before as much as is read sooner than any worker computes it."""
    able = [worker for worker in snapshot.workers if _sends(worker) and worker.serves(model)]
    known_s = [s for worker in able if (s := compute_seconds(worker, prompt_tokens, 0)) is not None]
    token_s = min(known_s) / prompt_tokens if known_s else 1 / DEFAULT_PREFILL_TOKENS_PER_S
    offers = [
        (min(near.blocks * worker.block_size_tokens, prompt_tokens - 1), near.read_s, worker)
        for worker in able
        for near in nearness(worker, confirmed)
    ]
    tokens, read_s, holder = max(
        offers,
        key=lambda one: (one[0] * token_s - one[1], one[0], -step_seconds(one[2])),
        default=(0, 0.0, None),
    )
    if holder is None or tokens < holder.block_size_tokens:
        return None
    busy_s = under_way.busy_s(holder.key, NO_WORKER, now) + step_seconds(holder) / 2
    pair = holder.key, NO_WORKER
    fixed_s = busy_s + read_s + times.calls_s(pair, now)
    tired = frozenset(taker for sender, taker in resting if sender == holder.key)
    return PrefixOffer(holder, whole_tokens(tokens, holder, holder), fixed_s, times.pace(pair, now), tired)


def whole_tokens(tokens: int, holder: Worker, taker: Worker) -> int:
    """How many of `tokens` leading tokens are whole blocks of both workers. One block size divides the other."""
    size = max(holder.block_size_tokens, taker.block_size_tokens, 1)
    return tokens // size * size


def compute_seconds(worker: Worker, tokens: int, context_tokens: int) -> float | None:
    """Seconds in which a worker computes `tokens` after `context_tokens`; None before it has measured."""
    load = worker.load
    if load.HasField("prompt_fit"):
        fit, most = prompt_fit_of(load.prompt_fit), worker.max_step_tokens or tokens
        # The step that computes the rest of the prompt is needed in any case.
        own_s = fit.chunk_s(tokens, context_tokens) + (tokens // max(1, most) - 1) * fit.base_s
        return own_s / max(1.0, load.lent_speedup)
    return tokens / load.prefill_tokens_per_second if load.prefill_tokens_per_second else None


def _compute_s(taker: Worker, holder: Worker, tokens: int, context_tokens: int) -> float | None:
    """Of the taker; a new worker is taken to be as fast as the other."""
    return compute_seconds(taker, tokens, context_tokens) or compute_seconds(holder, tokens, context_tokens)


def step_seconds(worker: Worker) -> float:
    """Seconds of the step that a worker is in; 0 where it has nothing to do."""
    load = worker.load
    step_s = load.decode_step_ms / 1e3 if load.running_requests else 0.0
    if load.waiting_tokens and load.prefill_tokens_per_second:
        chunk = min(load.waiting_tokens, worker.max_step_tokens or load.waiting_tokens)
        step_s += chunk / load.prefill_tokens_per_second
    return step_s


def _sends(worker: Worker) -> bool:
    """Whether a worker sends prefixes, to those that it is connected to."""
    sound = not worker.isolation.worker and not worker.circuit.tripped
    return worker.sends_kv and worker.usable and sound


def _plan(
    holder: Worker,
    near: Near,
    wanted: Wanted,
    held: int,
    times: FetchTimes,
    under_way: FetchesUnderWay,
    now: float,
) -> FetchPlan | None:
    taker = wanted.taker
    has = near.blocks * holder.block_size_tokens
    tokens = whole_tokens(min(has, wanted.most_tokens), holder, taker)
    more = tokens - held
    moved = more + wanted.held_below  # which travels, too
    if more <= 0 or not has_room(taker, moved):
        return None
    lane_s, compute_s = lane_seconds(holder, taker, moved), _compute_s(taker, holder, more, held)
    if lane_s is None or compute_s is None:
        return None
    wait_s = step_seconds(holder) / 2 + step_seconds(taker) + near.read_s
    wait_s += under_way.busy_s(holder.key, taker.key, now)
    pair = holder.key, taker.key
    fetch_s = wait_s + times.predicted_s(pair, lane_s, now)
    return FetchPlan(holder, taker, tokens, held, lane_s, times.pace(pair, now), wait_s, fetch_s, compute_s)


def _join(fetch: UnderWay, wanted: Wanted, now: float) -> FetchPlan | None:
    """Waiting for a fetch under way. What it brings beyond the prompt's own prefix does not count."""
    taker = wanted.taker
    keys = wanted.keys.get(taker.block_size_tokens, ())
    tokens = min(fetch.common_tokens(keys), whole_tokens(wanted.most_tokens, taker, taker))
    held = wanted.held_tokens(wanted.confirmed)
    if tokens <= held:
        return None
    compute_s = _compute_s(taker, fetch.holder, tokens - held, held)
    if compute_s is None:
        return None
    left_s = max(fetch.due_s - now, _LEAST_LEFT * (fetch.due_s - fetch.began_s))
    return FetchPlan(fetch.holder, taker, tokens, held, 0.0, 1.0, left_s, left_s, compute_s, fetch)
