"""The asynchronous edge of admission: requests wait on futures, and any event that frees capacity releases them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.queue import (
    CLASSES,
    REFUSAL_REASONS,
    Held,
    Refusal,
    RefusalReason,
)
from coordinator.request.inference_request import PriorityClass
from coordinator.request.state import NOT_HELD, Entry, RequestState, Waits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError
from splitserve.logs import log_event

Waiting = asyncio.Future[None]
Publish = Callable[[str, Held], None]
"""Takes a model and its queue's state, after each change."""


@dataclass(slots=True)
class AdmissionCounts:
    """Metrics of one model's admission. Read on other threads: values are only replaced or increased."""

    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(REFUSAL_REASONS, 0))
    queued: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    queued_prompt_tokens: int = 0


class CapacityAdmission:
    """Lets requests wait for capacity on the workers; see docs/guides/routing.md. Lives on one event loop."""

    def __init__(self, config: CoordinatorConfig, registry: Registry, publish: Publish) -> None:
        self._settings = config.admission
        self._local_prefill = config.local_prefill
        self._registry, self._publish_held = registry, publish
        self._models: dict[str, ModelAdmission] = {}
        self._waiting: dict[Entry, Waiting] = {}
        self._counts: dict[str, AdmissionCounts] = {}
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        """When each model's timer is due, on the monotonic clock, and the timer."""
        self._releasing: set[str] = set()
        """Models whose queues will be offered, at the end of this turn of the loop, the capacity that became free."""
        registry.subscribe(self._on_registry_change)

    async def admit(self, state: RequestState) -> None:
        """Returns once the request is admitted, at once where admission is off. Raises ResourceExhaustedError with a
        retry hint if it is refused."""
        if self._settings.mode == "off":
            return
        # One queue for a model and its adapters: they share the workers.
        model = state.request.model.base_name
        entry = state.flight
        entry.arrived_s = time.monotonic()
        try:
            await self.wait(model, entry)
        except BaseException:
            state.awaits_workers = self._models[model].awaits_workers
            raise
        state.from_zero = entry.from_zero
        if entry.started and (entry.from_zero or entry.marks != NOT_HELD):
            state.waits, state.predicted_ttft_s = Waits(*entry.marks), entry.predicted_ttft_s
            log_event("request.admitted", prefill_s=state.waits.prefill_s, decode_s=state.waits.decode_s)

    def counts(self) -> dict[str, AdmissionCounts]:
        """Counts so far, by model."""
        return dict(sorted(self._counts.copy().items()))

    def of(self, model: str) -> ModelAdmission:
        """The admission of a model that workers have registered."""
        admission = self._models.get(model)
        if admission is None:
            admission = ModelAdmission(self._settings, self._registry.loads, self._local_prefill)
            self._models[model] = admission
            self._counts[model] = AdmissionCounts()
            self._set_workers(model, admission)
        return admission

    async def wait(self, model: str, entry: Entry) -> None:
        """Returns once the entry is admitted. Raises ResourceExhaustedError if it is refused."""
        admission = self.of(model)
        if model in self._releasing:
            self._release_now(
                model
            )  # free capacity goes to waiting requests first, which makes room in the queue
        arrival = admission.arrive(entry, entry.arrived_s)
        if arrival.started:
            return
        for refusal in arrival.evicted:
            self._refuse(model, refusal)
        if arrival.refused is not None:
            self._counts[model].refused[arrival.refused.reason] += 1
            raise _error(arrival.refused)
        future = self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._publish(model, admission)
        try:
            await future
        except BaseException:
            # Cancelled or refused while waiting, possibly in the same turn of the loop as being admitted.
            self._end(model, entry)
            raise
        finally:
            self._waiting.pop(entry, None)

    def output_sent(self, state: RequestState, tokens: int, first: bool) -> None:
        """Counts output tokens of an admitted request, `first`: the first ones among them. The account of work is
        updated before."""
        if (admission := self._models.get(state.request.model.base_name)) is not None:
            admission.sent(state.flight, tokens)
        if first:
            self.freed(state)

    def freed(self, state: RequestState) -> None:
        """Takes notice that a request holds less of its workers' capacity than before, by the account of work."""
        model = state.request.model.base_name
        admission = self._models.get(model)
        if admission is not None and admission.queue.requests:
            self._release_soon(model)

    def ended(self, state: RequestState) -> None:
        """Takes notice that a request is over, admitted or not. Its capacity is free for the next one."""
        if (model := state.request.model.base_name) in self._models:
            self._end(model, state.flight)

    def _on_registry_change(self, worker: Worker | None) -> None:
        """Releases what fits after a load report of `worker`; None: the set of workers has changed."""
        if worker is None:
            for model, admission in self._models.items():
                self._set_workers(model, admission)
                if admission.queue.requests:
                    self._release(model, admission, time.monotonic())
            return
        reporting = self._models.get(worker.model.name)
        if reporting is not None and reporting.queue.requests:
            self._release(worker.model.name, reporting, time.monotonic())

    def _set_workers(self, model: str, admission: ModelAdmission) -> None:
        registry = self._registry
        admission.set_workers(registry.snapshot(), model, model in registry.plan.on_demand)

    def _end(self, model: str, entry: Entry) -> None:
        admission = self._models[model]
        queued = admission.queue.requests
        self._registry.loads.ended(entry)
        admission.ended(entry)
        if queued:  # counted before `ended`: a queue that is empty now must be published too
            self._release_soon(model)

    def _release_soon(self, model: str) -> None:
        """Releases once in a turn of the loop: one message of a worker may end many requests."""
        if model not in self._releasing:
            self._releasing.add(model)
            asyncio.get_running_loop().call_soon(self._release_now, model)

    def _release_now(self, model: str) -> None:
        self._releasing.discard(model)
        self._release(model, self._models[model], time.monotonic())

    def _release(self, model: str, admission: ModelAdmission, now: float) -> None:
        release = admission.release(now)
        for entry in release.started:
            future = self._waiting.get(entry)
            if future is not None and not future.done():
                future.set_result(None)
        for refusal in release.refused:
            self._refuse(model, refusal)
        self._publish(model, admission)

    def _refuse(self, model: str, refusal: Refusal) -> None:
        self._counts[model].refused[refusal.reason] += 1
        future = self._waiting.get(refusal.entry)
        if future is not None and not future.done():
            future.set_exception(_error(refusal))

    def _publish(self, model: str, admission: ModelAdmission) -> None:
        """Publishes the queue's state, and sets the timer for the next release that no event causes."""
        queue, counts = admission.queue, self._counts[model]
        counts.queued, counts.queued_prompt_tokens = queue.lengths(), queue.prompt_tokens
        self._publish_held(model, Held(queue.requests, queue.uncached_tokens, admission.held_by))
        release_s = admission.next_release_s()
        due_s, timer = self._timers.get(model, (float("inf"), None))
        if release_s == due_s:
            return
        if timer is not None:
            timer.cancel()
            del self._timers[model]
        if release_s < float("inf"):
            delay_s = max(0.001, release_s - time.monotonic())
            timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer, model)
            self._timers[model] = release_s, timer

    def _on_timer(self, model: str) -> None:
        self._timers.pop(model, None)
        self._release_now(model)


def _error(refusal: Refusal) -> ResourceExhaustedError:
    return ResourceExhaustedError(refusal.message, reason=refusal.reason, retry_after_s=refusal.retry_after_s)
