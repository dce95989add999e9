"""The quality watch: in rounds, asks pairs and decode workers for golden answers and acts on what is wrong.

One golden prompt is on its way at a time, so that the load is bounded. A busy target is left out of its round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prometheus_client.core import Metric

from coordinator.background_tasks import BackgroundTasks
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.quality.blame import isolations
from coordinator.quality.golden_answer import GoldenAnswer
from coordinator.quality.model_watch import ModelWatch
from coordinator.quality.prober import ANSWER_TOKENS, GoldenPrompt, Prober, WorkerProber
from coordinator.quality.prompts import golden_tokens, read_prompts
from coordinator.quality.quality_metrics import quality_metrics
from coordinator.quality.target import Target, targets_of
from coordinator.workers.catalog import Model
from coordinator.workers.clients import WorkerClients
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import NOT_ISOLATED, Isolation, PoolSnapshot, WorkerKey
from splitserve.config.coordinator import QualityConfig
from splitserve.errors import SplitserveError
from splitserve.logs import log_event, log_exception


class QualityWatch:
    """The watch of one coordinator. Coordinators of one cluster judge for themselves."""

    def __init__(
        self,
        config: QualityConfig,
        registry: Registry,
        tokenizers: PromptTokenizers,
        prober: Prober,
    ) -> None:
        """Raises ConfigError for a file of prompts that cannot be used."""
        self._config = config
        self._registry = registry
        self._tokenizers = tokenizers
        self._prober = prober
        self._texts = read_prompts(config.prompts)
        self._models: dict[str, ModelWatch] = {}

    @property
    def models(self) -> Mapping[str, ModelWatch]:
        """What is known of each served model, by name."""
        return self._models

    @property
    def loops(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What is to run beside the coordinator's servers, by name; nothing if the watch is off."""
        return {} if self._config.policy == "off" else {"quality": self.run}

    async def run(self) -> None:
        """Runs a round after each pause, and keeps the isolations right as workers come and go, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_isolations())
            while True:
                await asyncio.sleep(self._config.interval_s)
                await self.round()

    async def round(self) -> None:
        """One round of each model. What fails for one model keeps nothing from the others."""
        served = self._registry.snapshot().models()
        for name in self._models.keys() - served.keys():
            del self._models[name]
        for name, model in served.items():
            watch = self._models.get(name) or ModelWatch(name, self._config)
            self._models[name] = watch
            try:
                await self._round_of(watch, model)
            except SplitserveError as error:
                log_exception("quality.round_failed", error, model=name)

    def metrics(self) -> list[Metric]:
        """The watch's metrics, for a Prometheus scrape; none if it is off."""
        if self._config.policy == "off":
            return []
        isolated = [(w.model.name, w.pool, w.isolation) for w in self._registry.snapshot().workers]
        return quality_metrics([watch.figures for watch in list(self._models.values())], isolated)

    async def _round_of(self, watch: ModelWatch, model: Model) -> None:
        tokenizer = await self._tokenizers.tokenizer(model.tokenizer_source)
        snapshot = self._registry.snapshot()
        number = watch.figures.rounds % len(self._texts)
        room = model.context_tokens - ANSWER_TOKENS
        token_ids = golden_tokens(tokenizer, self._texts[number], room)
        targets = watch.begin_round(targets_of(snapshot, model.name))
        if not token_ids or not targets:
            return
        answers = await self._answers(watch, targets, GoldenPrompt(number, model, token_ids))
        registered = frozenset(worker.key for worker in self._registry.snapshot().workers)
        watch.end_round(number, answers, registered)
        self._isolate()

    async def _answers(
        self, watch: ModelWatch, targets: Sequence[Target], prompt: GoldenPrompt
    ) -> dict[Target, GoldenAnswer | None]:
        answers: dict[Target, GoldenAnswer | None] = {}
        # Asked once: later on, load reports would show the round's own prompts.
        busy = {key for target in targets for key in target.workers if self._is_busy(key)}
        for target in targets:
            if busy.intersection(target.workers):
                watch.count_skipped()
                continue
            try:
                answers[target] = await self._prober.ask(target, prompt)
            except SplitserveError as error:
                watch.count_unanswered()
                names = {"prefill_worker": target.prefill_name, "decode_worker": target.decode[0]}
                log_event("quality.unanswered", level=logging.DEBUG, reason=error.reason, **names)
        return answers

    def _is_busy(self, key: WorkerKey) -> bool:
        """Whether requests wait at a worker, or would for this probe."""
        worker = self._registry.get(key)
        if worker is None:
            return True
        load = worker.load
        full = load.running_requests >= worker.max_running_requests
        return full or load.waiting_tokens > 0 or load.waiting_reservations > 0

    async def _keep_isolations(self) -> None:
        while True:
            version = self._registry.version
            self._isolate()
            if self._registry.version == version:
                await self._registry.wait_change(version)

    def _isolate(self) -> None:
        """Applies the policy to what is at fault now. Runs again for each change: what may be spared depends on who is
        left."""
        if self._config.policy != "isolate":
            return
        snapshot = self._registry.snapshot()
        found: dict[WorkerKey, Isolation] = {}
        for watch in self._models.values():
            found |= isolations(snapshot, watch.condemned)
        before = {w.key: w.isolation for w in snapshot.workers if w.isolation != NOT_ISOLATED}
        if found == before:
            return
        self._registry.set_isolations(found)
        _log_moved(snapshot, before, found)


def quality_watch(
    config: QualityConfig,
    registry: Registry,
    tokenizers: PromptTokenizers,
    clients: WorkerClients,
    background: BackgroundTasks,
) -> QualityWatch:
    """The watch of a running coordinator."""
    return QualityWatch(config, registry, tokenizers, WorkerProber(registry, clients, background))


def _log_moved(
    snapshot: PoolSnapshot, before: Mapping[WorkerKey, Isolation], after: Mapping[WorkerKey, Isolation]
) -> None:
    names = {worker.agent_id: worker.worker_id for worker in snapshot.workers}
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, NOT_ISOLATED), after.get(key, NOT_ISOLATED)
        if was != now:
            pairs = sorted(names[agent] for agent in now.agents)
            log_event(
                "quality.isolated" if now != NOT_ISOLATED else "quality.readmitted",
                level=logging.WARNING,
                worker_id=key[0],
                whole=now.worker,
                not_with=pairs,
            )
