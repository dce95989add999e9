"""Carries fetches out: reserves at the taker, has the holder push, waits until the blocks are in the taker's cache."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import Metric

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.hot_prefixes import HotPrefixes, Prefix
from coordinator.peer_fetch.policy import FetchMeter, FetchPlan, plan_fetch
from coordinator.request.candidates import FetchedPrefix
from coordinator.request.ids import random_hex
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestEvents
from coordinator.request.state import RequestState
from coordinator.routing.local_prefill import NO_LIMIT
from coordinator.routing.router import Pair
from coordinator.workers.client import WorkerClient, WorkerClients
from coordinator.workers.output_collector import OutputCollector, WorkerFailed
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import DeadlineExceededError, SplitserveError
from splitserve.logs import log_event
from splitserve.metrics import counter, counters
from splitserve.rpc.status import failure_error
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

LEAST_TIMEOUT_S = 0.05
"""However short computing would be, a fetch may take so long."""
REST_S = 10.0
"""How long a pair of workers whose fetch has failed is left alone."""
OUTCOMES = ("completed", "failed")

AnyCall = TypeVar("AnyCall", decode_pb2.ReserveRequest, prefill_pb2.PrefillRequest)


@dataclass(slots=True)
class FetchCounts:
    """Sums over all fetches that were chosen for a request. Seconds of the completed ones."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    tokens: int = 0
    took_s: float = 0.0
    predicted_s: float = 0.0
    compute_s: float = 0.0
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
        self._meter = FetchMeter()
        self._resting: dict[tuple[WorkerKey, WorkerKey], float] = {}
        """Holder and taker, and until when."""

    def plan(self, state: RequestState, pair: Pair) -> FetchPlan | None:
        """The fetch that is worth it before an attempt on this pair, if any. Call it before the attempt is counted."""
        request = state.request
        if not request.block_keys:
            return None
        now, prompt_tokens = time.monotonic(), len(request.prompt) + len(state.token_ids)
        self._resting = {pair: until_s for pair, until_s in self._resting.items() if until_s > now}
        prefixes = self._registry.prefixes
        confirmed = prefixes.hits_of(request.block_keys, now, confirmed_only=True)
        if not confirmed:
            return None
        if not state.attempts:
            self._learn(request, confirmed, now)
        return plan_fetch(
            self._registry.snapshot(),
            self._computing(pair, prompt_tokens),
            prompt_tokens,
            prefixes.hits_of(request.block_keys, now),
            confirmed,
            self._meter,
            request.model.name,
            self._resting,
        )

    async def fetch(self, plan: FetchPlan, events: RequestEvents) -> None:
        """Carries out a request's fetch, and records it. Raises nothing but CancelledError."""
        request, began_s, failure = events.state.request, time.monotonic(), ""
        tokens = (*request.prompt, *events.state.token_ids)[: plan.tokens]
        prefix = _prefix_of(request, tokens)
        moved, limit_s = 0, min(max(plan.compute_s, LEAST_TIMEOUT_S), max(1e-3, request.deadline_s - began_s))
        try:
            moved = await self.bring(plan.holder, plan.taker, prefix, limit_s)
        except SplitserveError as error:
            failure = f"{error.reason}: {error.message}"
        took_s = time.monotonic() - began_s
        self._count(plan, moved * plan.taker.block_size_tokens, took_s, failure)
        events.prefix_fetched(
            FetchedPrefix(
                plan.holder.worker_id,
                plan.taker.worker_id,
                plan.tokens - plan.held_tokens,
                plan.fetch_s,
                plan.compute_s,
                took_s,
                failure,
            )
        )

    async def bring(self, holder: Worker, taker: Worker, prefix: Prefix, limit_s: float) -> int:
        """Brings a prefix into the taker's cache within `limit_s`; the blocks that travelled.

        Raises SplitserveError: of either worker, or DeadlineExceededError (FETCH_TOO_SLOW).
        """
        source, target = self._clients.client_for(holder), self._clients.client_for(taker)
        fetch = _Fetch(source, target, prefix, self._background, time.monotonic() + limit_s)
        try:
            async with asyncio.timeout(limit_s):
                return await fetch.run()
        except TimeoutError:
            message = f"the prefix was not there within {limit_s:.3f} s, in which it is computed"
            raise DeadlineExceededError(message, reason="FETCH_TOO_SLOW") from None
        finally:
            fetch.close()

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

    def _count(self, plan: FetchPlan, moved_tokens: int, took_s: float, failure: str) -> None:
        counts, tokens = self.counts, plan.tokens - plan.held_tokens
        log_event(
            "prefix.fetched",
            holder=plan.holder.worker_id,
            taker=plan.taker.worker_id,
            tokens=tokens,
            predicted_ms=round(plan.fetch_s * 1e3, 3),
            compute_ms=round(plan.compute_s * 1e3, 3),
            took_ms=round(took_s * 1e3, 3),
            failure=failure,
        )
        if failure:
            counts.outcomes["failed"] += 1
            self._resting[plan.holder.key, plan.taker.key] = time.monotonic() + REST_S
            return
        if moved_tokens >= tokens:  # if some were there already, it says little of the lane
            self._meter.record(plan.lane_s, took_s - plan.wait_s)
        counts.outcomes["completed"] += 1
        counts.tokens += min(tokens, moved_tokens)
        counts.took_s += took_s
        counts.predicted_s += plan.fetch_s
        counts.compute_s += plan.compute_s


class _Fetch:
    """One fetch from its reservation to its end. Call `close` in any case."""

    def __init__(
        self,
        holder: WorkerClient,
        taker: WorkerClient,
        prefix: Prefix,
        background: BackgroundTasks,
        deadline_s: float,
    ) -> None:
        self._holder, self._taker, self._prefix = holder, taker, prefix
        self._background, self._deadline_s = background, deadline_s
        self._name = f"prefix-{random_hex(16)}"
        self._collector = OutputCollector()
        self._push: asyncio.Task[None] | None = None
        self._ended = self._written = False
        self._attached = ExitStack()
        for client in (holder, taker):
            here = client.attached(self._name, self._collector, decodes=client is taker)
            self._attached.enter_context(here)

    async def run(self) -> int:
        """The blocks that travelled. Raises what either worker has failed with."""
        left_s = self._left_s()
        reserve = self._filled(decode_pb2.ReserveRequest(writer_agent_id=self._holder.worker.agent_id))
        response = await self._taker.reserve(reserve, left_s)
        count = len(response.ticket.block_indices)
        if not count:
            return 0  # it has come by itself meanwhile
        push = self._filled(prefill_pb2.PrefillRequest(ticket=response.ticket))
        call = self._holder.prefill(push, self._left_s(), self._collector)
        self._push = self._background.start(call)
        while not self._ended:
            await self._collector.wait()
            self._accept()
        return count

    def close(self) -> None:
        """Ends what has not ended on both workers. Never blocks."""
        self._attached.close()
        if self._push is not None:
            self._push.cancel()
        if not self._ended:
            no_writer = self._push is None or self._written
            self._background.start(self._taker.abort(self._name, no_writer, self._deadline_s))

    def _accept(self) -> None:
        for event in self._collector.take_all():
            match event:
                case decode_pb2.SequenceOutput():
                    self._ended = self._ended or bool(event.delta.finish_reason)
                    if event.HasField("failure"):
                        raise failure_error(event.failure.reason, event.failure.message)
                case prefill_pb2.HandoffDone():
                    self._written = True
                case WorkerFailed():
                    raise event.error
                case prefill_pb2.FirstToken():
                    pass  # of a holder that does not know of prefixes, and has computed

    def _filled(self, request: AnyCall) -> AnyCall:
        prefix = self._prefix
        request.request_id, request.prefix_only = self._name, True
        request.token_ids.extend(prefix.token_ids)
        request.cache_salt = prefix.cache_salt
        request.sampling.CopyFrom(generation_pb2.SamplingParams(temperature=0.0))
        request.stop.max_tokens = 1
        request.timeout.FromNanoseconds(int(self._left_s() * 1e9))
        if prefix.adapter is not None:
            request.adapter.CopyFrom(generation_pb2.AdapterRef(**prefix.adapter._asdict()))
        return request

    def _left_s(self) -> float:
        return max(1e-3, self._deadline_s - time.monotonic())


def _prefix_of(request: InferenceRequest, token_ids: Sequence[int]) -> Prefix:
    return Prefix(request.model.name, token_ids, request.caller.cache_salt, request.model.adapter)
