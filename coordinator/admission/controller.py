"""The asynchronous edge of admission: requests wait on futures, and any event that frees capacity releases them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coordinator.admission.entry import (
    CLASSES,
    NOT_HELD,
    REFUSAL_REASONS,
    Entry,
    Held,
    Refusal,
    RefusalReason,
)
from coordinator.admission.model_admission import ModelAdmission
from coordinator.request.caller import NO_TARGETS, PriorityClass
from coordinator.request.observer import RequestEvents, RequestObserver
from coordinator.request.state import RequestState, Waits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError
from splitserve.histograms import DurationCounts
from splitserve.logs import log_event

_NEW_SHARE = 0.1
"""Weight of a request in the share of those with a target."""
Waiting = asyncio.Future[None]
Publish = Callable[[str, Held], None]
"""Takes a model and what is held of it, after each change."""


@dataclass(slots=True)
class AdmissionCounts:
    """Metrics of one model's admission. Read on other threads: values are only replaced or increased."""

    waited: Mapping[PriorityClass, DurationCounts] = field(
        default_factory=lambda: {name: DurationCounts() for name in CLASSES}
    )
    """Queueing time of admitted requests, including those that did not wait."""
    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(REFUSAL_REASONS, 0))
    queued: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    queued_prompt_tokens: int = 0


class CapacityAdmission:
    """An AdmissionPlugin: requests wait for capacity on the workers; see docs/admission.md. Lives on one event loop."""

    def __init__(self, config: CoordinatorConfig, registry: Registry, publish: Publish) -> None:
        self._settings = config.admission
        self._local_prefill, self._hybrid = config.local_prefill, config.hybrid == "on"
        self._targeted = 0.0
        """Share of the latest requests that have a target for their first token."""
        self._registry, self._publish_held = registry, publish
        self._models: dict[str, ModelAdmission] = {}
        self._waiting: dict[Entry, Waiting] = {}
        self._counts: dict[str, AdmissionCounts] = {}
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        """When each model's timer is due, on the monotonic clock, and the timer."""
        self._releasing: set[str] = set()
        """Models whose queue is offered what has become free in this turn of the loop."""
        registry.subscribe(self._on_registry_change)

    async def admit(self, events: RequestEvents) -> None:
        """See AdmissionPlugin."""
        # One queue for a model and its adapters: they share the workers.
        state = events.state
        model, entry = state.request.model.base_name, _entry(state, time.monotonic())
        self._targeted += (float(entry.due_s < float("inf")) - self._targeted) * _NEW_SHARE
        try:
            await self.wait(model, entry)
        except BaseException:
            state.awaits_workers = self._models[model].awaits_workers
            raise
        state.from_zero = entry.from_zero
        events.observe(_Admitted(self, model, entry))
        if entry.started and (entry.from_zero or entry.marks != NOT_HELD):
            waits = Waits(*entry.marks)
            events.waited(waits, entry.predicted_ttft_s)
            log_event("request.admitted", prefill_s=waits.prefill_s, decode_s=waits.decode_s)

    def counts(self) -> dict[str, AdmissionCounts]:
        """Counts so far, by model."""
        return dict(sorted(self._counts.copy().items()))

    def of(self, model: str) -> ModelAdmission:
        """The admission of a model that workers have registered."""
        admission = self._models.get(model)
        if admission is None:
            admission = self._models[model] = ModelAdmission(self._settings, self._registry.loads)
            admission.bounds_prefill = self._local_prefill != "always"
            admission.hybrid = self._hybrid
            self._counts[model] = AdmissionCounts()
            self._set_workers(model, admission)
        return admission

    async def wait(self, model: str, entry: Entry) -> None:
        """Returns once the entry is admitted. Raises ResourceExhaustedError if it is refused."""
        admission = self.of(model)
        if model in self._releasing:
            self._release_now(model)  # what is free goes to who waits, and makes room in the queue
        self._set_help(admission, entry.arrived_s)
        arrival = admission.arrive(entry, entry.arrived_s)
        if arrival.started:
            self._counts[model].waited[entry.priority_class].add(0.0)
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
            self._counts[model].waited[entry.priority_class].add(time.monotonic() - entry.arrived_s)
        except BaseException:
            # Cancelled or refused while waiting, possibly in the same turn of the loop as being admitted.
            self.ended(model, entry)
            raise
        finally:
            self._waiting.pop(entry, None)

    def sent(self, model: str, entry: Entry, tokens: int) -> None:
        """See RequestObserver."""
        admission = self._models[model]
        if admission.sent(entry, tokens, time.monotonic()) and admission.queue.requests:
            self._release_soon(model)

    def decoded(self, model: str, entry: Entry) -> None:
        """See RequestObserver."""
        admission = self._models[model]
        admission.decoded(entry)
        if admission.queue.requests:
            self._release_soon(model)

    def ended(self, model: str, entry: Entry) -> None:
        """See RequestObserver. What the request held is free for the next one."""
        admission = self._models[model]
        holds = entry.decode is not None or not (entry.started and entry.computed)
        had = admission.queue.requests
        admission.ended(entry)
        if had and holds:
            self._release_soon(model)

    def _on_registry_change(self, worker: Worker | None) -> None:
        """See Registry.subscribe: a load report of `worker`, or another set of workers."""
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

    def _set_help(self, admission: ModelAdmission, now: float) -> None:
        """Decode workers add to prefill capacity as far as they may compute prompts."""
        lent = self._local_prefill == "auto" or self._registry.plan.lends(now)
        share = 1.0 if lent else self._targeted if self._hybrid else 0.0
        admission.prefill.set_help(admission.pinned_decodes, share, lent)

    def _release_soon(self, model: str) -> None:
        """Once for all that frees capacity in one turn of the loop: a worker's message may end many requests."""
        if model not in self._releasing:
            self._releasing.add(model)
            asyncio.get_running_loop().call_soon(self._release_now, model)

    def _release_now(self, model: str) -> None:
        self._releasing.discard(model)
        self._release(model, self._models[model], time.monotonic())

    def _release(self, model: str, admission: ModelAdmission, now: float) -> None:
        self._set_help(admission, now)
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
        """Publishes the queue's state, and sets the timer for the next change that time alone brings."""
        queue, counts = admission.queue, self._counts[model]
        counts.queued, counts.queued_prompt_tokens = queue.lengths(), queue.prompt_tokens
        self._publish_held(model, Held(queue.requests, queue.uncached_tokens, admission.held_by))
        now = time.monotonic()
        release_s = admission.next_release_s(now)
        due_s, timer = self._timers.get(model, (float("inf"), None))
        if release_s == due_s:
            return
        if timer is not None:
            timer.cancel()
            del self._timers[model]
        if release_s < float("inf"):
            delay_s = max(0.001, release_s - now)
            timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer, model)
            self._timers[model] = release_s, timer

    def _on_timer(self, model: str) -> None:
        self._timers.pop(model, None)
        self._release_now(model)


class _Admitted(RequestObserver):
    """Reports the events of one admitted request to CapacityAdmission."""

    __slots__ = ("_admission", "_entry", "_model")

    def __init__(self, admission: CapacityAdmission, model: str, entry: Entry) -> None:
        self._admission, self._model, self._entry = admission, model, entry

    def routed(self, state: RequestState) -> None:
        """See RequestObserver."""
        prefill, decode = state.attempt.prefill.key, state.attempt.decode
        admission = self._admission.of(self._model)
        admission.routed(self._entry, prefill, decode.key if decode else None, time.monotonic())

    def sent(self, state: RequestState, output_tokens: int) -> None:
        """See RequestObserver."""
        self._admission.sent(self._model, self._entry, output_tokens)

    def decoded(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._admission.decoded(self._model, self._entry)

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """See RequestObserver."""
        self._admission.ended(self._model, self._entry)


def _entry(state: RequestState, now: float) -> Entry:
    """Admission's view of a request."""
    request, caller, resumed = state.request, state.request.caller, len(state.request.resumed)
    targets = request.targets or NO_TARGETS
    return Entry(
        request_id=request.request_id,
        tenant=caller.tenant,
        weight=caller.weight,
        priority_class=caller.priority_class,
        priority=request.priority,
        prompt_tokens=len(request.prompt) + resumed,
        uncached_tokens=state.estimate.uncached_tokens + resumed,
        read_s=state.estimate.read_s,
        held_tokens=state.estimate.held_tokens,
        expected_output=max(1.0, state.estimate.output_tokens - resumed),
        max_output=request.max_tokens - resumed,
        needs_decode=state.needs_decode,
        arrived_s=now,
        deadline_s=request.deadline_s,
        tpot_slo_s=targets.tpot_s,
        due_s=request.received_s + targets.ttft_s if targets.ttft_s is not None else float("inf"),
        ttft_slo_s=request.slo_ttft_s,
        resumed=resumed > 0,
    )


def _error(refusal: Refusal) -> ResourceExhaustedError:
    return ResourceExhaustedError(refusal.message, reason=refusal.reason, retry_after_s=refusal.retry_after_s)
