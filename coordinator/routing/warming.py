"""Warms a new worker: before it joins, it computes the hottest prefixes of its model's latest prompts.

A prefix is hot if several of the latest prompts begin with it, under the same salt and with the same adapter. The
coordinator sends hot prefixes as prompts without a ticket, so that they stay in the worker's prefix cache. This delays
no request: workers are warmed only while others serve their model.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from coordinator.request.inference_request import precedence_of
from coordinator.workers.client import WorkerClients
from coordinator.workers.output_stream import OutputCollector, WorkerFailed
from coordinator.workers.prefix_index import RecentPrompt
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.v1 import generation_pb2, prefill_pb2

KEPT_PROMPTS = 256
"""Latest prompts of a model among which prefixes are counted."""
WARM_S = 5.0
"""Longest time for warming a worker. A worker that is not warmed joins after `rotation.JOIN_WAIT_S`."""
POOL_SHARE = 0.25
"""Largest share of a worker's KV blocks for hot prefixes."""
LEAST_PRIORITY = -100


class Warmer:
    """Warms workers with the hottest prefixes that this coordinator has sent, at most `most` of them."""

    def __init__(self, registry: Registry, clients: WorkerClients, most: int) -> None:
        self._registry, self._clients, self._most = registry, clients, most

    async def run(self) -> None:
        """Warms each cold worker once, until cancelled."""
        begun: set[WorkerKey] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                version = self._registry.version
                cold = {worker.key: worker for worker in self._registry.cold_workers()}
                for key in cold.keys() - begun:
                    group.create_task(self._warm(cold[key]))
                begun = set(cold)
                await self._registry.wait_change(version)

    async def _warm(self, worker: Worker) -> None:
        began_s, computed = time.monotonic(), list[RecentPrompt]()
        max_tokens = int(POOL_SHARE * worker.load.total_blocks) * worker.block_size_tokens
        recent = self._registry.prefixes.recent.of(worker.model.name)
        usable = (
            prompt
            for prompt in recent
            if prompt.adapter is None or worker.adapters.get(prompt.adapter.name) == prompt.adapter
        )
        prefixes = hottest(usable, worker.block_size_tokens, self._most, max_tokens)
        try:
            async with asyncio.timeout(WARM_S):
                for prefix in prefixes:
                    await self._compute(worker, prefix)
                    computed.append(prefix)
        except (SplitserveError, TimeoutError) as error:
            log_event("worker.not_warmed", worker_id=worker.worker_id, error=str(error) or "late")
        finally:
            self._registry.warmed(worker.key)
        log_event(
            "worker.warmed",
            worker_id=worker.worker_id,
            prefixes=len(computed),
            tokens=sum(len(prefix.token_ids) for prefix in computed),
            duration_ms=round((time.monotonic() - began_s) * 1e3, 3),
        )

    async def _compute(self, worker: Worker, prefix: RecentPrompt) -> None:
        request = prefill_pb2.PrefillRequest(
            request_id=f"warm-{secrets.token_hex(6)}",
            token_ids=prefix.token_ids,
            sampling=generation_pb2.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            stop=generation_pb2.StopParams(max_tokens=1),
            cache_salt=prefix.cache_salt,
            precedence=precedence_of("", "batch", LEAST_PRIORITY),
            adapter=generation_pb2.AdapterRef(**prefix.adapter._asdict()) if prefix.adapter else None,
        )
        request.timeout.FromNanoseconds(int(WARM_S * 1e9))
        collector = OutputCollector()
        client, background = self._clients.client_for(worker), self._clients.background
        cancel = client.prefill(request, WARM_S, collector, background)
        try:
            await collector.wait()
        finally:
            cancel()
        for event in collector.take_all():
            if isinstance(event, WorkerFailed):
                raise event.error


def hottest(
    prompts: Iterable[RecentPrompt], block_size: int, most: int, max_tokens: int
) -> Sequence[RecentPrompt]:
    """The prefixes that most of these prompts share, at most `most`, and at most `max_tokens` tokens together. Each has
    whole blocks and is the longest that at least two prompts share; none is the beginning of another."""
    prompts = list(prompts)
    uses = Counter(key for prompt in prompts for key in prompt.keys)
    shared: dict[int, RecentPrompt] = {}
    for prompt in prompts:
        depth = sum(uses[key] > 1 for key in prompt.keys)
        if depth:
            keys = prompt.keys[:depth]
            shared[keys[-1]] = prompt._replace(token_ids=prompt.token_ids[: depth * block_size], keys=keys)
    chosen: list[RecentPrompt] = []
    for prefix in sorted(
        shared.values(), key=lambda prefix: (uses[prefix.keys[-1]], len(prefix.keys)), reverse=True
    ):
        keys_of_prefix = set(prefix.keys)
        kept = [other for other in chosen if other.keys[-1] not in keys_of_prefix]
        tokens = len(prefix.token_ids) + sum(len(other.token_ids) for other in kept)
        if len(kept) < most and tokens <= max_tokens:
            chosen = [*kept, prefix]
    return chosen
