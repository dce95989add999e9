"""Chooses the pair of workers for an attempt and the worker that computes its prompt, and updates the account of
work."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable

from coordinator.request.inference_request import CLASS_RANKS
from coordinator.request.state import NO_WAITS, RequestState
from coordinator.routing.router import (
    RETRY_AFTER_S,
    Pair,
    Router,
    RoutingRequest,
    local_tokens_of_pair,
    no_pair,
)
from coordinator.workers.prefix_index import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError
from splitserve.logs import log_event

Publish = Callable[[str, int], None]
"""Takes a base model and how many of its requests wait for the first workers, after each change."""
SAME_WORKER_AGAIN_S = 0.25
"""How long a resume waits for workers that have not failed the request before it accepts the failed ones."""


ROLE_REPORTED_S = 1.0
"""How long a resume waits for the report of a worker whose role has changed. Workers report a new role within 0.1 s."""


class PairSelector:
    """The three steps before an attempt: `route`, `place` and `account`."""

    def __init__(
        self, config: CoordinatorConfig, registry: Registry, router: Router, publish: Publish
    ) -> None:
        self._config, self._registry, self._router, self._publish = config, registry, router, publish
        self._without_workers = Counter[str]()
        """Requests that wait for the first workers of their base model."""
        self._turns = itertools.count()
        self._explains = config.records.enabled
        """Whether records keep the predicted costs of other workers."""

    async def route(self, state: RequestState) -> Pair:
        """A pair for the next attempt, if possible without workers that have failed this request.

        If workers are started on demand, waits for the first ones until the request's deadline. Raises UnavailableError
        (NO_WORKER, SLOW_LANE) if there is no pair within `no_worker_wait_s`.
        """
        if (worker := state.other_role) is not None:
            state.other_role = None
            await self._registry.wait_until(lambda: self._has_another_role(worker), ROLE_REPORTED_S)
        request = self._routing_request(state)
        wait_s = self._config.no_worker_wait_s
        pair: Pair | None = None
        if state.failed_workers:
            others = dataclasses.replace(request, exclude=frozenset(state.failed_workers))
            settle_s = min(SAME_WORKER_AGAIN_S, wait_s)
            pair = await self._registry.wait_until(lambda: self._choose(others), settle_s)
        if pair is None and self._registry.plan.on_demand and (pair := self._choose(request)) is None:
            await self._first_workers(state)
        pair = pair or await self._registry.wait_until(lambda: self._choose(request), wait_s)
        if pair is None:
            raise no_pair(self._registry.snapshot(), request, RETRY_AFTER_S)
        _log_chosen(pair, request)
        return pair

    def place(self, state: RequestState, pair: Pair) -> int:
        """Prompt tokens that the decode worker of the pair may compute itself; 0: the prompt is handed off."""
        loads, tpot_s = self._registry.loads, state.request.targets.tpot_s
        choice = self._config.local_prefill, pair, state.context_tokens, loads, tpot_s
        tokens = local_tokens_of_pair(*choice)
        state.relieves_prefill = tokens > 0 and not local_tokens_of_pair(*choice, behind_queue=False)
        return tokens

    def account(self, state: RequestState, pair: Pair, local_tokens: int) -> None:
        """Enters the attempt, which has just begun, in the account of work, and its prompt in the prefix index."""
        attempt, tokens = state.attempt, state.context_tokens
        prefill, decode = pair.prefill.key, pair.decode.key if pair.decode is not None else None
        lacking = tokens - min(pair.cost.decode_cached_tokens, tokens - 1)
        self._registry.loads.route(
            state.flight,
            prefill,
            decode,
            tokens - pair.cost.cached_tokens,
            local_tokens=lacking if local_tokens >= lacking and not pair.is_own else 0,
        )
        workers = [key for key in dict.fromkeys((prefill, decode)) if key is not None]
        for key in workers:
            self._registry.count_request(key)
        if state.request.block_keys:
            self._registry.prefixes.expect(workers, state.request.block_keys, attempt.began_s)
            if attempt.number == 1:
                request = state.request
                self._registry.prefixes.recent.add(
                    request.model, request.prompt, request.block_keys, request.caller.cache_salt
                )

    def prompt_begun(self, state: RequestState) -> None:
        """Notes in the account of work that the decode worker computes the prompt, or that the prefill worker is called
        now."""
        attempt = state.attempt
        prefill = None if attempt.is_local else attempt.prefill.key
        uncached_tokens = state.context_tokens - attempt.expected_cached_tokens
        self._registry.loads.prompt_begun(state.flight, prefill, uncached_tokens)

    async def _first_workers(self, state: RequestState) -> None:
        """Waits until each pool of the request's model has a worker in service or starts none on demand, at most until
        the request's deadline.

        Raises ResourceExhaustedError (QUEUE_FULL) if as many requests wait as may queue, unless the request had begun
        on workers that have gone.
        """
        model, waiting = state.request.model.base_name, self._without_workers
        if not self._lacks_workers(model):
            return
        if not state.attempts and waiting[model] >= self._config.admission.max_queued_requests:
            message = f"{waiting[model]} requests wait for the first workers"
            raise ResourceExhaustedError(message, reason="QUEUE_FULL", retry_after_s=RETRY_AFTER_S)
        state.awaits_workers = state.from_zero = True
        waiting[model] += 1
        self._publish(model, waiting[model])
        try:
            left_s = state.request.deadline_s - time.monotonic()
            came = await self._registry.wait_until(lambda: not self._lacks_workers(model), left_s)
        finally:
            waiting[model] -= 1
            self._publish(model, waiting[model])
        state.awaits_workers = not came

    def _lacks_workers(self, model: str) -> bool:
        """Whether a pool has no worker in service, and its workers are started on demand."""
        registry = self._registry
        return model in registry.plan.on_demand and registry.snapshot().lacks_workers(model)

    def _has_another_role(self, before: Worker) -> bool:
        worker = self._registry.get(before.key)
        return worker is None or worker.role != before.role

    def _routing_request(self, state: RequestState) -> RoutingRequest:
        """The routing policy's view of the next attempt."""
        request, sent = state.request, len(state.token_ids)
        return RoutingRequest(
            request.model.name,
            state.context_tokens,
            state.needs_decode,
            turn=next(self._turns),
            hits=self._hits(state),
            expected_output_tokens=max(1.0, state.estimate.output_tokens - sent),
            session_id=request.session_id,
            class_rank=CLASS_RANKS[request.caller.priority_class],
            is_local=self._config.local_prefill == "always",
            wants_candidates=self._explains,
        )

    def _hits(self, state: RequestState) -> PrefixHits:
        """The cached prefixes: from the estimate while it is fresh. Caches change while a request waits, so they are
        looked up again later."""
        hits = state.estimate.hits
        if hits is not None and not state.attempts and state.waits is NO_WAITS:
            return hits
        return self._registry.prefixes.hits(state.request.block_keys, time.monotonic())

    def _choose(self, request: RoutingRequest) -> Pair | None:
        return self._router.choose_pair(self._registry.snapshot(), self._registry.loads, request)


def _log_chosen(pair: Pair, request: RoutingRequest) -> None:
    cost = pair.cost
    log_event(
        "route.chosen",
        level=logging.DEBUG,
        prefill_worker=pair.prefill.worker_id,
        decode_worker=pair.decode.worker_id if pair.decode else "",
        queue_ms=cost.queue_s * 1e3,
        prefill_ms=cost.prefill_s * 1e3,
        transfer_ms=cost.transfer_s * 1e3,
        decode_wait_ms=cost.decode_wait_s * 1e3,
        uncached_tokens=request.prompt_tokens - cost.cached_tokens,
        decode_cached_tokens=cost.decode_cached_tokens,
    )
