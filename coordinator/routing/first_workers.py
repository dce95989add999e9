"""Requests outside admission's queue that wait for the first workers of a pool, where they are started on demand.

They are those of a coordinator without a queue, and those whose workers went while they were being served.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from coordinator.request.state import RequestState
from coordinator.routing.router import RETRY_AFTER_S
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import AdmissionConfig
from splitserve.errors import ResourceExhaustedError

Publish = Callable[[str, int], None]
"""Takes a base model and how many of its requests wait, after each change."""


class FirstWorkers:
    """Holds as many requests of a model, with as many prompt tokens, as the queue may. Lives on one event loop."""

    def __init__(self, settings: AdmissionConfig, registry: Registry, publish: Publish) -> None:
        self._settings, self._registry, self._publish = settings, registry, publish
        self._requests, self._prompt_tokens = Counter[str](), Counter[str]()

    async def come(self, state: RequestState) -> None:
        """Returns once each pool of the request's model has a worker in service, or none is started on demand any more,
        or at its deadline. At once where that is so already.

        Raises ResourceExhaustedError (QUEUE_FULL) where too many wait, unless it has begun on workers that went.
        """
        model, tokens = state.request.model.base_name, len(state.request.prompt)
        if not self._awaited(model):
            return
        if not state.attempts:
            self._check_room(model, tokens)
        state.awaits_workers = state.from_zero = True
        self._count(model, 1, tokens)
        try:
            left_s = state.request.deadline_s - time.monotonic()
            came = await self._registry.wait_until(lambda: not self._awaited(model), left_s)
        finally:
            self._count(model, -1, -tokens)
        state.awaits_workers = not came

    def _awaited(self, model: str) -> bool:
        registry = self._registry
        return model in registry.plan.on_demand and registry.snapshot().lacks_workers(model)

    def _check_room(self, model: str, tokens: int) -> None:
        requests, queued = self._requests[model], self._prompt_tokens[model]
        most, most_tokens = self._settings.max_queued_requests, self._settings.max_queued_prompt_tokens
        if requests and (requests >= most or queued + tokens > most_tokens):
            message = f"{requests} requests with {queued} prompt tokens wait for the first workers"
            raise ResourceExhaustedError(message, reason="QUEUE_FULL", retry_after_s=RETRY_AFTER_S)

    def _count(self, model: str, requests: int, tokens: int) -> None:
        self._requests[model] += requests
        self._prompt_tokens[model] += tokens
        self._publish(model, self._requests[model])
