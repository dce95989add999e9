"""The coordinator's admission on simulated requests, all of one tenant and of the class `standard`.

Decisions are made at the same moments as in production: at arrivals, first tokens, ends, reports, changes of the
rotation, and when a wait is over. Output tokens are counted with the workers' reports instead of one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster.simulated_coordinator import MODEL, REPORT_S, SimulatedCoordinator
from autoscaler.simulation.scenario import Scenario
from coordinator.admission.model_admission import ModelAdmission
from coordinator.admission.queue import Held
from coordinator.request.inference_request import ANYONE
from coordinator.request.state import Entry
from splitserve.config.coordinator import CoordinatorConfig

TIMEOUT_S: float = CoordinatorConfig.model_fields["request_timeout_s"].default
"""Deadline of each request."""
_LEAST_WAIT_S = 1e-3
_NEVER = float("inf")

RequestEvent = Callable[[SimulatedRequest, float], None]


class AdmittedRequests:
    """Requests between arrival and end. Calls `begin` for each one that is admitted, `refuse` for the others."""

    def __init__(
        self,
        scenario: Scenario,
        workers: SimulatedCoordinator,
        events: EventQueue,
        begin: RequestEvent,
        refuse: RequestEvent,
        *,
        on_demand: bool,
    ) -> None:
        assert scenario.admission is not None
        self._loads, self._settings = workers.loads, scenario.admission
        self._admission = ModelAdmission(self._settings, self._loads, scenario.local_prefill)
        self._on_demand = on_demand
        self._workers, self._events = workers, events
        self._begin, self._refuse = begin, refuse
        self._entries: dict[SimulatedRequest, Entry] = {}
        self._requests: dict[Entry, SimulatedRequest] = {}
        self._wakes_s = _NEVER
        self._counted_s = -_NEVER

    @property
    def held(self) -> Held:
        """What waits for admission."""
        queue = self._admission.queue
        return Held(queue.requests, queue.uncached_tokens, self._admission.held_by)

    def rotated(self, now_s: float) -> None:
        """Takes the new set of workers that accept requests."""
        self._admission.set_workers(self._workers.snapshot, MODEL.name, self._on_demand)
        self._release(now_s)

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Begins, queues or refuses a request that arrives now."""
        self._count_output(now_s)
        entry = self._entry(request, now_s)
        self._entries[request], self._requests[entry] = entry, request
        arrival = self._admission.arrive(entry, now_s)
        for refusal in (*arrival.evicted, *filter(None, [arrival.refused])):
            self._drop(refusal.entry, now_s)
        if arrival.started:
            self._admit(request, now_s)
        self._plan_next(now_s)

    def entry(self, request: SimulatedRequest) -> Entry:
        """The request in the account of work, from arrival to end."""
        return self._entries[request]

    def first_token(self, request: SimulatedRequest, now_s: float) -> None:
        """Notes that a prompt has been computed."""
        self._sent(self._entries[request], 1)
        self._release(now_s)

    def ended(self, request: SimulatedRequest, now_s: float) -> None:
        """Notes that a request is over."""
        entry = self._entries.pop(request)
        del self._requests[entry]
        self._loads.ended(entry)
        self._admission.ended(entry)
        self._release(now_s)

    def _sent(self, entry: Entry, tokens: int) -> None:
        self._loads.output(entry, tokens)
        self._admission.sent(entry, tokens)

    def _release(self, now_s: float) -> None:
        if self._admission.queue.requests:
            self._count_output(now_s)
            release = self._admission.release(now_s)
            for refusal in release.refused:
                self._drop(refusal.entry, now_s)
            for entry in release.started:
                self._admit(self._requests[entry], now_s)
        self._plan_next(now_s)

    def _admit(self, request: SimulatedRequest, now_s: float) -> None:
        request.held_s, _ = self._entries[request].marks
        self._begin(request, now_s)

    def _drop(self, entry: Entry, now_s: float) -> None:
        request = self._requests.pop(entry)
        self._entries.pop(request)
        self._refuse(request, now_s)

    def _plan_next(self, now_s: float) -> None:
        """Wakes while requests wait: at the next report, or sooner when a wait is over."""
        due_s = min(self._admission.next_release_s(), self._workers.next_report_s)
        if not self._admission.queue.requests or self._wakes_s <= due_s:
            return
        self._wakes_s = max(due_s, now_s + _LEAST_WAIT_S)
        self._events.at(self._wakes_s, partial(self._wake, self._wakes_s))

    def _wake(self, planned_s: float, now_s: float) -> None:
        if planned_s == self._wakes_s:
            self._wakes_s = _NEVER
            self._release(now_s)

    def _count_output(self, now_s: float) -> None:
        """Takes the reports that are due, and counts the tokens decoded since an interval of reports ago."""
        self._workers.take_reports(now_s)
        if now_s < self._counted_s + REPORT_S:
            return
        self._counted_s = now_s
        for replica in self._workers.replicas.values():
            for request, tokens in replica.produced(now_s):
                entry = self._entries[request]
                if tokens > entry.sent:
                    self._sent(entry, tokens - entry.sent)

    def _entry(self, request: SimulatedRequest, now_s: float) -> Entry:
        estimate, ttft_slo_s = self._workers.estimate(request, now_s), self._settings.ttft_slo_s
        return Entry(
            request_id="",
            tenant=ANYONE.tenant,
            weight=1.0,
            priority_class="standard",
            priority=0,
            prompt_tokens=request.prompt_tokens,
            uncached_tokens=estimate.uncached_tokens,
            expected_output=estimate.output_tokens,
            max_output=MODEL.context_tokens,
            needs_decode=request.output_tokens > 1,
            arrived_s=now_s,
            deadline_s=now_s + TIMEOUT_S,
            due_s=_NEVER if ttft_slo_s is None else request.arrival_s + ttft_slo_s,
            ttft_slo_s=ttft_slo_s if self._settings.on_late == "refuse" else None,
        )
