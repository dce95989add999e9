"""Admission at the edge: requests wait on futures, and whatever makes room lets them go at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from coordinator.admission.entry import CLASSES, NOT_HELD, Entry
from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.refusal import REFUSAL_REASONS, Refusal, RefusalReason
from coordinator.caller import PriorityClass
from coordinator.gates import NO_WAITS, Passage, Waits
from coordinator.phase_counts import DurationCounts
from coordinator.pools import Worker, WorkerKey
from coordinator.registry import Registry
from coordinator.request_validation import Generation
from coordinator.signal_book import Held, SignalBook
from splitserve.config import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError
from splitserve.logs import log_event

Waiting = asyncio.Future[None]


@dataclass(slots=True)
class AdmissionCounts:
    """What metrics show of one model's admission. Read on other threads: only replaced or increased."""

    waited: Mapping[PriorityClass, DurationCounts] = field(
        default_factory=lambda: {name: DurationCounts() for name in CLASSES}
    )
    """Time in the queue of those who went on, zero included."""
    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(REFUSAL_REASONS, 0))
    queued: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    queued_prompt_tokens: int = 0


class AdmissionGate:
    """A gate in front of the workers; see docs/admission.md. Lives on one event loop."""

    def __init__(self, config: CoordinatorConfig, registry: Registry, book: SignalBook) -> None:
        self._settings = config.admission
        self._local_prefill = config.local_prefill
        self._registry, self._book = registry, book
        self._models: dict[str, ModelAdmission] = {}
        self._waiting: dict[Entry, Waiting] = {}
        self._counts: dict[str, AdmissionCounts] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        registry.watch(self._heard)

    def entered(self, generation: Generation) -> AdmissionPassage:
        """See Gate."""
        return AdmissionPassage(self, generation)

    def counts(self) -> dict[str, AdmissionCounts]:
        """What happened so far, by model."""
        return dict(sorted(self._counts.copy().items()))

    def of(self, model: str) -> ModelAdmission:
        """The admission of a model that workers have registered."""
        admission = self._models.get(model)
        if admission is None:
            admission = self._models[model] = ModelAdmission(self._settings)
            admission.bounds_prefill = self._local_prefill != "always"
            self._counts[model] = AdmissionCounts()
            self._renew(model, admission)
        return admission

    def entry(self, generation: Generation, now: float) -> Entry:
        """A request as admission sees it."""
        book, caller = self._book.of(generation.model.name), generation.caller
        prompt = len(generation.prompt)
        return Entry(
            request_id=generation.request_id,
            tenant=caller.tenant,
            weight=caller.weight,
            priority_class=caller.priority_class,
            priority=generation.priority,
            prompt_tokens=prompt,
            uncached_tokens=prompt * (1.0 - book.cached_share.value),
            expected_output=min(book.expected_output.value, generation.max_tokens),
            max_output=generation.max_tokens,
            needs_decode=generation.max_tokens > 1,
            arrived_s=now,
            deadline_s=generation.deadline_s,
        )

    async def wait(self, model: str, entry: Entry) -> None:
        """Returns when the entry may go on. Raises ResourceExhaustedError."""
        admission = self.of(model)
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
        self._show(model, admission)
        try:
            await future
            self._counts[model].waited[entry.priority_class].add(time.monotonic() - entry.arrived_s)
        except BaseException:
            # Cancelled, refused while waiting, or both at once with being let go.
            self.ended(model, entry)
            raise
        finally:
            self._waiting.pop(entry, None)

    def sent(self, model: str, entry: Entry, tokens: int) -> None:
        """See Passage."""
        admission = self._models[model]
        now = time.monotonic()
        if admission.sent(entry, tokens, now) and admission.queue.requests:
            self._release(model, admission, now)

    def decoded(self, model: str, entry: Entry) -> None:
        """See Passage."""
        admission = self._models[model]
        admission.decoded(entry)
        if admission.queue.requests:
            self._release(model, admission, time.monotonic())

    def ended(self, model: str, entry: Entry) -> None:
        """The request is over: what it held is free for the next one."""
        admission = self._models[model]
        had = admission.queue.requests
        admission.ended(entry)
        if had:
            self._release(model, admission, time.monotonic())

    def _heard(self, worker: Worker | None) -> None:
        """The registry has something new: a load report, or another set of workers."""
        if worker is None:
            for model, admission in self._models.items():
                self._renew(model, admission)
                if admission.queue.requests:
                    self._release(model, admission, time.monotonic())
            return
        heard = self._models.get(worker.model.name)
        if heard is not None:
            heard.hear(worker)
            if heard.queue.requests:
                self._release(worker.model.name, heard, time.monotonic())

    def _renew(self, model: str, admission: ModelAdmission) -> None:
        admission.renew(self._registry.snapshot(), model)

    def _release(self, model: str, admission: ModelAdmission, now: float) -> None:
        lent = self._local_prefill == "auto" or self._registry.plan.lends(now)
        prefills, decodes = len(admission.prefill.lanes), len(admission.decode.lanes)
        # Decode workers that compute prompts too take their part of them.
        admission.prefill.stretch = (prefills + decodes) / prefills if lent and prefills else 1.0
        release = admission.release(now)
        for entry in release.started:
            future = self._waiting.get(entry)
            if future is not None and not future.done():
                future.set_result(None)
        for refusal in release.refused:
            self._refuse(model, refusal)
        self._show(model, admission)

    def _refuse(self, model: str, refusal: Refusal) -> None:
        self._counts[model].refused[refusal.reason] += 1
        future = self._waiting.get(refusal.entry)
        if future is not None and not future.done():
            future.set_exception(_error(refusal))

    def _show(self, model: str, admission: ModelAdmission) -> None:
        """Says what waits, and sets the timer for what time alone changes."""
        queue, counts = admission.queue, self._counts[model]
        counts.queued, counts.queued_prompt_tokens = queue.lengths(), queue.prompt_tokens
        self._book.of(model).held = Held(queue.requests, queue.uncached_tokens, admission.held_by)
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        look_s = admission.next_look_s(now)
        timer = self._timers.pop(model, None)
        if timer is not None:
            timer.cancel()
        if look_s < float("inf"):
            delay_s = max(0.001, look_s - now)
            self._timers[model] = loop.call_later(delay_s, self._look, model)

    def _look(self, model: str) -> None:
        self._timers.pop(model, None)
        self._release(model, self._models[model], time.monotonic())


class AdmissionPassage(Passage):
    """One request's way through the queue; a context around its life."""

    __slots__ = ("_entry", "_gate", "_generation", "_model")

    def __init__(self, gate: AdmissionGate, generation: Generation) -> None:
        self._gate, self._generation, self._model = gate, generation, generation.model.name

    async def __aenter__(self) -> Self:
        self._entry = self._gate.entry(self._generation, time.monotonic())
        await self._gate.wait(self._model, self._entry)
        if (waits := self.waits) is not NO_WAITS:
            log_event("request.admitted", prefill_s=waits.prefill_s, decode_s=waits.decode_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.ended(self._model, self._entry)

    @property
    def waits(self) -> Waits:
        """See Passage."""
        entry = self._entry
        return Waits(*entry.marks) if entry.started and entry.marks != NOT_HELD else NO_WAITS

    def routed(self, prefill: WorkerKey, decode: WorkerKey | None) -> None:
        """See Passage."""
        self._gate.of(self._model).routed(self._entry, prefill, decode, time.monotonic())

    def sent(self, output_tokens: int) -> None:
        """See Passage."""
        self._gate.sent(self._model, self._entry, output_tokens)

    def decoded(self) -> None:
        """See Passage."""
        self._gate.decoded(self._model, self._entry)


def _error(refusal: Refusal) -> ResourceExhaustedError:
    return ResourceExhaustedError(refusal.message, reason=refusal.reason, retry_after_s=refusal.retry_after_s)
