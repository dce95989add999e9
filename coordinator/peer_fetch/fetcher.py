"""Carries fetches out for requests, and counts them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.fetch_times import FetchTimes, beyond_idle_s
from coordinator.peer_fetch.hot_prefixes import HotPrefixes, Prefix
from coordinator.peer_fetch.policy import FetchPlan, Wanted, offer_of, plan_fetch, step_seconds
from coordinator.peer_fetch.prefix_fetch import FETCH_RANK, SEED_RANK, TOO_SLOW, FetchParts, fetch_prefix
from coordinator.peer_fetch.prefix_offer import PrefixOffer, lane_seconds, lane_seconds_of_bytes
from coordinator.peer_fetch.under_way import FetchesUnderWay, UnderWay
from coordinator.request.candidates import FetchedPrefix
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestState
from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.routing.router import Pair
from coordinator.workers.clients import WorkerClients
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.metrics import counter, counters
from splitserve.v1 import prefill_pb2

LEAST_TIMEOUT_S = 0.05
"""However short computing would be, a fetch may take so long."""
REST_S = 10.0
"""How long a pair of workers whose fetch has failed is left alone."""
OUTCOMES = ("completed", "failed")
BUSY = ("NO_ROOM_FOR_PREFIX", "PREFIX_READS_FULL")
"""The taker needs its blocks for requests now, or the holder reads for others: no fault of the pair."""


@dataclass(slots=True)
class FetchCounts:
    """Sums over all fetches that were chosen for a request. Seconds of the completed ones."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    tokens: int = 0
    took_s: float = 0.0
    predicted_s: float = 0.0
    compute_s: float = 0.0
    joined: int = 0
    """Requests that waited for a fetch that was under way for another one."""
    seeded_tokens: int = 0
    """Of fetches that no request asked for."""


class PrefixFetcher:
    """Chooses and carries out the fetches of one coordinator. A fetch that fails costs its time, never an answer."""

    def __init__(
        self,
        config: CoordinatorConfig,
        registry: Registry,
        clients: WorkerClients,
        background: BackgroundTasks,
    ) -> None:
        self.counts, self.hot = FetchCounts(), HotPrefixes()
        self._always_local = config.local_prefill == "always"
        self._registry, self._clients, self._background = registry, clients, background
        self.times, self.under_way = FetchTimes(), FetchesUnderWay(background)
        self._resting: dict[tuple[WorkerKey, WorkerKey], float] = {}
        """Holder and taker, and until when."""

    def plan(self, state: RequestState, pair: Pair) -> FetchPlan | None:
        """The fetch that is worth it before an attempt on this pair, if any. Call it before the attempt is counted."""
        request, now, prefixes = state.request, self._now(), self._registry.prefixes
        confirmed, prompt_tokens = self._confirmed(request, now), _prompt_tokens(state)
        if not confirmed:
            return None
        if not state.attempts:
            self._learn(request, confirmed, now)
        wanted = Wanted(
            self._computing(pair, prompt_tokens),
            prompt_tokens,
            request.block_keys,
            prefixes.hits_of(request.block_keys, now),
            confirmed,
            request.model.name,
        )
        return plan_fetch(self._registry.snapshot(), wanted, self.times, self.under_way, now, self._resting)

    def offer(self, state: RequestState) -> PrefixOffer | None:
        """What workers that lack the prompt's prefix could get of it, for the choice among them."""
        request, now = state.request, self._now()
        if not (confirmed := self._confirmed(request, now)):
            return None
        parts = self.times, self.under_way, request.model.name, self._resting
        return offer_of(self._registry.snapshot(), _prompt_tokens(state), confirmed, *parts, now)

    async def fetch(self, plan: FetchPlan, events: RequestEvents) -> None:
        """Carries out a request's fetch, or waits for the one under way, and records it. Raises nothing but
        CancelledError."""
        request, began_s = events.state.request, time.monotonic()
        failure: SplitserveError | None = None
        limit_s = min(max(plan.compute_s, LEAST_TIMEOUT_S), max(1e-3, request.deadline_s - began_s))
        under_way, parts = plan.joined, FetchParts()
        moved = 0
        try:
            if under_way is None:
                tokens = (*request.prompt, *events.state.token_ids)[: plan.tokens]
                keys = request.block_keys.get(plan.taker.block_size_tokens, ())
                keys = keys[: plan.tokens // plan.taker.block_size_tokens]
                under_way = self._begin(plan, _prefix_of(request, tokens), keys, limit_s, parts)
            moved = await under_way.wait(limit_s)
        except SplitserveError as error:
            failure = error
        parts.took_s = time.monotonic() - began_s
        self._count(plan, moved * plan.taker.block_size_tokens, parts, failure)
        events.prefix_fetched(
            FetchedPrefix(
                plan.holder.worker_id,
                plan.taker.worker_id,
                plan.tokens - plan.held_tokens,
                plan.fetch_s,
                plan.compute_s,
                parts.took_s,
                _told(failure),
                joined=plan.joined is not None,
            )
        )

    async def seed(
        self, holder: Worker, taker: Worker, prefix: Prefix, keys: Sequence[int], limit_s: float
    ) -> int:
        """Brings a prefix that no request has asked for; the blocks that travelled. Requests may wait for it.

        Raises SplitserveError: of either worker, or DeadlineExceededError (FETCH_TOO_SLOW).
        """
        lane_s, now = lane_seconds(holder, taker, len(prefix.token_ids)) or 0.0, time.monotonic()
        due_s = now + self.times.predicted_s((holder.key, taker.key), lane_s, now)
        seed = UnderWay(holder, taker, keys, now, due_s, lane_s, is_seed=True)
        bring = partial(self._bring, holder, taker, prefix, limit_s, SEED_RANK, FetchParts())
        moved = await self.under_way.begin(seed, bring).wait(limit_s)
        self.counts.seeded_tokens += moved * taker.block_size_tokens
        return moved

    def _confirmed(self, request: InferenceRequest, now: float) -> PrefixHits | None:
        """What workers hold of a prompt by their own word; None without anything that has a name."""
        if not request.block_keys:
            return None
        return self._registry.prefixes.hits_of(request.block_keys, now, confirmed_only=True)

    def _now(self) -> float:
        """The time; pairs that have rested are no longer known."""
        now = time.monotonic()
        self._resting = {pair: until_s for pair, until_s in self._resting.items() if until_s > now}
        return now

    def _begin(
        self,
        plan: FetchPlan,
        prefix: Prefix,
        keys: Sequence[int],
        limit_s: float,
        parts: FetchParts,
    ) -> UnderWay:
        now, holder, taker = time.monotonic(), plan.holder, plan.taker
        fetch = UnderWay(holder, taker, keys, now, now + plan.fetch_s, plan.pace * plan.lane_s)
        bring = partial(self._bring, holder, taker, prefix, limit_s, FETCH_RANK, parts)
        return self.under_way.begin(fetch, bring)

    async def _bring(
        self,
        holder: Worker,
        taker: Worker,
        prefix: Prefix,
        limit_s: float,
        rank: int,
        parts: FetchParts,
    ) -> int:
        def written(done: prefill_pb2.HandoffDone) -> None:
            if rank == FETCH_RANK:  # seeds give way to others
                self._learn_write(holder, taker, done)

        source, target = self._clients.client_for(holder), self._clients.client_for(taker)
        return await fetch_prefix(
            source,
            target,
            prefix,
            self._background,
            limit_s,
            rank=rank,
            parts=parts,
            on_written=written,
        )

    def _learn_write(self, holder: Worker, taker: Worker, done: prefill_pb2.HandoffDone) -> None:
        """Of a holder that computes the end of a write is noticed after a step only, which is not the lane's time."""
        there = self._registry.get(holder.key)
        if any(step_seconds(each) for each in (holder, there) if each is not None):
            return
        lane_s = lane_seconds_of_bytes(holder, taker, done.written_bytes)
        if lane_s is not None and done.written_bytes:
            pair = holder.key, taker.key
            self.times.record_write(pair, lane_s, done.transfer_ms / 1e3, time.monotonic())

    def metrics(self) -> list[Metric]:
        """The counts, for a Prometheus scrape."""
        counts = self.counts
        return [
            counters(
                "splitserve_prefix_fetches",
                "Prefixes fetched from another worker's cache",
                "outcome",
                counts.outcomes,
            ),
            counter("splitserve_prefix_fetch_tokens", "Prompt tokens of completed fetches", counts.tokens),
            counter(
                "splitserve_prefix_fetches_joined",
                "Requests that waited for another one's fetch",
                counts.joined,
            ),
            counter("splitserve_prefix_seeded_tokens", "Tokens seeded into workers", counts.seeded_tokens),
            counter("splitserve_prefix_fetch_seconds", "Time of completed fetches", counts.took_s),
            counter(
                "splitserve_prefix_fetch_predicted_seconds", "Time predicted for them", counts.predicted_s
            ),
            counter(
                "splitserve_prefix_fetch_compute_seconds", "Time predicted to compute them", counts.compute_s
            ),
        ]

    def _learn(self, request: InferenceRequest, hits: PrefixHits, now: float) -> None:
        """Counts what of a new prompt any cache has. Depths in blocks of several sizes cannot be told apart here."""
        if len(request.block_keys) == 1:
            ((size, keys),) = request.block_keys.items()
            depth = min(hits.levels[-1][0], len(keys))
            self.hot.found(keys[depth - 1], _prefix_of(request, request.prompt), depth * size, now)

    def _computing(self, pair: Pair, prompt_tokens: int) -> Worker:
        """The worker of a pair that is expected to compute the prompt."""
        local_tokens = pair.local_tokens
        if local_tokens is None:
            local_tokens = NO_LIMIT if self._always_local else 0
        if pair.decode is not None and prompt_tokens - pair.cost.decode_cached_tokens <= local_tokens:
            return pair.decode
        return pair.prefill

    def _count(
        self, plan: FetchPlan, moved_tokens: int, parts: FetchParts, failure: SplitserveError | None
    ) -> None:
        counts, tokens = self.counts, plan.tokens - plan.held_tokens
        log_event(
            "prefix.fetched",
            holder=plan.holder.worker_id,
            taker=plan.taker.worker_id,
            tokens=tokens,
            joined=plan.joined is not None,
            predicted_ms=round(plan.fetch_s * 1e3, 3),
            wait_ms=round(plan.wait_s * 1e3, 3),
            lane_ms=round(plan.lane_s * 1e3, 3),
            pace=round(plan.pace, 3),
            compute_ms=round(plan.compute_s * 1e3, 3),
            took_ms=round(parts.took_s * 1e3, 3),
            reserve_ms=round(parts.reserve_s * 1e3, 3),
            waited_ms=round(parts.waited_s * 1e3, 3),
            failure=_told(failure),
        )
        if plan.joined is not None:
            counts.joined += 1  # the fetch itself is counted where it was begun
            return
        pair, now, reason = (plan.holder.key, plan.taker.key), time.monotonic(), failure and failure.reason
        # One that the taker has kept waiting throughout says nothing of the pair: computing would have waited, too.
        waited_only = reason == TOO_SLOW and not parts.reserve_s
        # One that was too slow would have taken longer yet. If some were there already, it says little of the lane.
        if (reason == TOO_SLOW and not waited_only) or (failure is None and moved_tokens >= tokens):
            step_s = step_seconds(plan.taker)
            wait_s = plan.wait_s - step_s + max(step_s, beyond_idle_s(parts.waited_s))
            self.times.record(pair, plan.lane_s, parts.took_s - wait_s, now)
        if failure is not None:
            counts.outcomes["failed"] += 1
            if reason not in BUSY and not waited_only:
                self._resting[pair] = now + REST_S
            return
        counts.outcomes["completed"] += 1
        counts.tokens += min(tokens, moved_tokens)
        counts.took_s += parts.took_s
        counts.predicted_s += plan.fetch_s
        counts.compute_s += plan.compute_s


def _prompt_tokens(state: RequestState) -> int:
    return len(state.request.prompt) + len(state.token_ids)


def _told(failure: SplitserveError | None) -> str:
    return f"{failure.reason}: {failure.message}" if failure is not None else ""


def _prefix_of(request: InferenceRequest, token_ids: Sequence[int]) -> Prefix:
    return Prefix(request.model.name, token_ids, request.caller.cache_salt, request.model.adapter)
