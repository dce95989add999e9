"""Adapter: the coordinator's admission on simulated requests, all of one tenant and of the class `standard`.

Decisions are made when they are in production: at arrivals, first tokens, ends, reports, changes of the rotation, and
when a wait is over. Output tokens are counted with the workers' reports instead of one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster.routed_workers import RoutedWorkers
from autoscaler.simulation.cluster.simulated_registry import MODEL, REPORT_S
from autoscaler.simulation.cluster_settings import ClusterSettings
from coordinator.admission.entry import NOTHING_HELD, Entry, Held
from coordinator.admission.model_admission import ModelAdmission
from coordinator.request.caller import ANYONE
from coordinator.workers.snapshot import WorkerKey
from engine.pacing.token_clock import ServiceTargets
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig

TIMEOUT_S: float = CoordinatorConfig.model_fields["request_timeout_s"].default
"""Deadline of each request."""
_LEAST_WAIT_S = 1e-3
_NEVER = float("inf")

RequestEvent = Callable[[SimulatedRequest, float], None]


class AdmittedRequests:
    """Requests between arrival and end. Calls `begin` for each one that is admitted, `refuse` for the others.

    Each has the cluster's targets, or else the settings' one for its first token. `lent` says whether decode workers
    compute prompts, too.
    """

    def __init__(
        self,
        settings: AdmissionConfig,
        cluster: ClusterSettings,
        workers: RoutedWorkers,
        events: EventQueue,
        begin: RequestEvent,
        refuse: RequestEvent,
        lent: Callable[[], bool],
    ) -> None:
        self._admission, self._settings = ModelAdmission(settings, workers.registry.loads), settings
        self._admission.bounds_prefill = not cluster.colocated
        self._admission.hybrid = self._hybrid = cluster.hybrid
        self._targets = cluster.targets or ServiceTargets(ttft_s=settings.ttft_slo_s)
        self._on_demand = cluster.on_demand
        self._workers, self._events = workers, events
        self._begin, self._refuse, self._lent = begin, refuse, lent
        self._entries: dict[SimulatedRequest, Entry] = {}
        self._requests: dict[Entry, SimulatedRequest] = {}
        self._wakes_s = _NEVER
        self._counted_s = -_NEVER

    @property
    def held(self) -> Held:
        """What waits for admission."""
        queue = self._admission.queue
        if not queue.requests:
            return NOTHING_HELD
        return Held(queue.requests, queue.uncached_tokens, self._admission.held_by)

    def rotated(self, now_s: float) -> None:
        """Another set of workers takes requests."""
        self._admission.set_workers(self._workers.registry.snapshot, MODEL.name, self._on_demand)
        self._release(now_s)

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Begins, queues or refuses a request that arrives now."""
        self._count_output(now_s)
        entry = self._entry(request, now_s)
        self._entries[request], self._requests[entry] = entry, request
        self._set_help()
        arrival = self._admission.arrive(entry, now_s)
        for refusal in (*arrival.evicted, *filter(None, [arrival.refused])):
            self._drop(refusal.entry, now_s)
        if arrival.started:
            self._admit(request, now_s)
        self._plan_next(now_s)

    def routed(
        self, request: SimulatedRequest, prefill: WorkerKey, decode: WorkerKey | None, now_s: float
    ) -> None:
        """The request was sent to this pair, whoever of both computes its prompt."""
        self._admission.routed(self._entries[request], prefill, decode, now_s)

    def first_token(self, request: SimulatedRequest, now_s: float) -> None:
        """The prompt has been computed."""
        self._admission.sent(self._entries[request], 1, now_s)
        self._release(now_s)

    def ended(self, request: SimulatedRequest, now_s: float) -> None:
        """The request is over."""
        entry = self._entries.pop(request)
        del self._requests[entry]
        self._admission.ended(entry)
        self._release(now_s)

    def _set_help(self) -> None:
        lent = self._lent()
        share = 1.0 if lent or self._hybrid else 0.0  # all have targets here, or none
        self._admission.prefill.set_help(self._admission.pinned_decodes, share, lent)

    def _release(self, now_s: float) -> None:
        if self._admission.queue.requests:
            self._count_output(now_s)
            self._set_help()
            release = self._admission.release(now_s)
            for refusal in release.refused:
                self._drop(refusal.entry, now_s)
            for entry in release.started:
                self._admit(self._requests[entry], now_s)
        self._plan_next(now_s)

    def _admit(self, request: SimulatedRequest, now_s: float) -> None:
        request.admitted_s = now_s
        request.held_s = self._entries[request].marks
        self._begin(request, now_s)

    def _drop(self, entry: Entry, now_s: float) -> None:
        request = self._requests.pop(entry)
        self._entries.pop(request)
        self._refuse(request, now_s)

    def _plan_next(self, now_s: float) -> None:
        """Wakes at the next report while requests wait, sooner where time alone changes something."""
        due_s = min(self._admission.next_release_s(now_s), self._workers.registry.next_report_s)
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
        self._workers.registry.take_reports(now_s)
        if now_s < self._counted_s + REPORT_S:
            return
        self._counted_s = now_s
        for replica in self._workers.registry.decode.values():
            for request, tokens in replica.produced(now_s):
                entry = self._entries[request]
                if tokens > entry.sent:
                    self._admission.sent(entry, tokens - entry.sent, now_s)

    def _entry(self, request: SimulatedRequest, now_s: float) -> Entry:
        estimate, targets = self._workers.estimate(request, now_s), self._targets
        return Entry(
            request_id="",
            tenant=ANYONE.tenant,
            weight=1.0,
            priority_class="standard",
            priority=0,
            prompt_tokens=request.prompt_tokens,
            uncached_tokens=estimate.uncached_tokens,
            held_tokens=estimate.held_tokens,
            expected_output=estimate.output_tokens,
            max_output=MODEL.context_tokens,
            needs_decode=request.output_tokens > 1,
            arrived_s=now_s,
            deadline_s=now_s + TIMEOUT_S,
            tpot_slo_s=targets.tpot_s,
            due_s=_NEVER if targets.ttft_s is None else request.arrival_s + targets.ttft_s,
            ttft_slo_s=self._settings.ttft_slo_s if self._settings.on_late == "refuse" else None,
        )
