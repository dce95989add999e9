"""Admission to one model: the queue, the workers' capacity, forecasts, and the decision about each request. Pure.

Methods take the time as an argument and return decisions, which `coordinator.admission.controller` carries out. A
forecast of queueing time and TTFT decides which requests are refused, and with which retry hint.
"""

from __future__ import annotations

import heapq
import math
import zlib
from dataclasses import dataclass
from itertools import islice

from coordinator.admission.capacity import DecodeCapacity, NoCapacity, PrefillCapacity
from coordinator.admission.queue import (
    OUTPUT_TOKEN_COST,
    STARTED,
    AdmissionQueue,
    Ahead,
    Arrival,
    Cause,
    Refusal,
    RefusalReason,
    Release,
)
from coordinator.request.state import GONE, Entry, PairCost
from coordinator.routing.router import local_prefill_tokens
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from coordinator.workers.snapshot import PoolSnapshot
from splitserve.config.coordinator import AdmissionConfig, LocalPrefill
from splitserve.queues import Offer, offer_in_order

LEAST_RETRY_S = 0.1
MOST_RETRY_S = 60.0
_JITTER = 0.25
"""Relative spread of retry hints."""
_CAUTION = 0.85
"""Share of an allowed wait that a forecast may fill, because forecasts are right only on average."""
_LEAST_SLO_SHARE = 0.25
"""A prompt whose computation takes nearly all of the TTFT target, or more, may still wait for this share of the
target."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast for one request, in seconds."""

    wait_s: float | None
    """Until a worker starts the prompt. None while no rate has been measured: requests are never refused on a guess."""
    queue_s: float
    """The part of `wait_s` spent in the coordinator's queue, not on the worker."""
    compute_s: float
    """Time to compute the prompt once started."""

    @property
    def ttft_s(self) -> float | None:
        """Time until the first token."""
        return None if self.wait_s is None else self.wait_s + self.compute_s


def forecast(entry: Entry, ahead: Ahead, prefill: PrefillCapacity, decode: DecodeCapacity) -> Forecast:
    """The forecast for an entry with `ahead` queued before it: the longer of the waits for prefill and for decode.

    Each wait is the work ahead over the pool's throughput. Prefill: uncached tokens over tokens per second. Decode: the
    requests ahead, less those that fit now, must wait for as many sequences to end. Running sequences end when their
    remaining output is done; beyond those, by Little's law, a worker with n sequences completes n / (output tokens x
    step time) per second.
    """
    rate = prefill.rate
    if rate is None:
        return Forecast(None, 0.0, 0.0)
    compute_s = entry.uncached_tokens * len(prefill.workers) / rate
    wait_s = prefill.backlog_s + ahead.uncached_tokens / rate
    queue_s = max(0.0, wait_s - prefill.horizon_s)
    if entry.needs_decode:
        decode_s = _decode_wait_s(entry, ahead, decode)
        wait_s, queue_s = max(wait_s, decode_s), max(queue_s, decode_s)
    return Forecast(wait_s, queue_s, compute_s)


def _decode_wait_s(entry: Entry, ahead: Ahead, decode: DecodeCapacity) -> float:
    waiting = ahead.requests + 1
    output = max(1.0, (ahead.output_tokens + entry.expected_output) / waiting)
    free = ended_per_s = 0.0
    ends_s: list[float] = []
    for load in decode.workers.values():
        context = load.context_tokens / len(load.flights) if load.flights else entry.prompt_tokens
        free += max(0.0, decode.batch_limit(load, entry, context, output) - load.requests)
        if step_s := load.latency.decode_step_s(max(1, load.requests), load.context_tokens):
            ended_per_s += load.requests / (output * step_s)
            ends_s += [other.remaining_output * step_s for other in load.flights]
    # Sequences that must end before this request fits: first those running, by their remaining output.
    missing = math.ceil(waiting - free)
    if missing <= 0 or ended_per_s <= 0:
        return 0.0
    ends_s.sort()
    if missing <= len(ends_s):
        return ends_s[missing - 1]
    return (ends_s[-1] if ends_s else 0.0) + (missing - len(ends_s)) / ended_per_s


def retry_after_s(request_id: str, wait_s: float | None, limit_s: float) -> float:
    """Retry hint in seconds: until the forecast wait has fallen to the limit; about 1 s without a forecast.

    Bounded, and spread by a hash of the request id, so that requests refused together do not retry together.
    """
    hint_s = 1.0 if wait_s is None else wait_s - limit_s
    spread = zlib.crc32(request_id.encode()) / 2**32
    hint_s *= 1 + _JITTER * (2 * spread - 1)
    return round(min(max(hint_s, LEAST_RETRY_S * (1 + spread)), MOST_RETRY_S), 3)


def _slo_wait_s(entry: Entry, compute_s: float) -> float:
    """Seconds that a request may wait until its prompt starts; infinity unless late requests are refused."""
    slo_s = entry.ttft_slo_s
    if slo_s is None or entry.resumed:
        return float("inf")
    return max(slo_s - compute_s, _LEAST_SLO_SHARE * slo_s)


def queue_limit_s(settings: AdmissionConfig, entry: Entry, compute_s: float) -> float:
    """Seconds that a request may stay queued; on its worker it may wait for another `prefill_horizon_s`."""
    slo_s = _slo_wait_s(entry, compute_s)
    return min(settings.max_queue_s, max(slo_s - settings.prefill_horizon_s, slo_s / 2))


def refusal_of(settings: AdmissionConfig, entry: Entry, predicted: Forecast, now: float) -> Refusal | None:
    """Why a new request is refused by its forecast; None: it may wait."""
    if predicted.wait_s is None or entry.resumed:  # an answer that has begun is not refused by a forecast
        return None
    left_s = entry.deadline_s - now
    slo_s = _CAUTION * min(settings.max_queue_s, _slo_wait_s(entry, predicted.compute_s))
    queue_s = _CAUTION * queue_limit_s(settings, entry, predicted.compute_s)
    if predicted.wait_s + predicted.compute_s > left_s:
        limit_s = max(0.0, left_s - predicted.compute_s)
        return _too_late(entry, "WOULD_MISS_DEADLINE", "begin", predicted.wait_s, limit_s)
    if predicted.wait_s > slo_s:
        return _too_late(entry, "WOULD_MISS_SLO", "begin", predicted.wait_s, slo_s)
    if predicted.queue_s > queue_s:
        return _too_late(entry, "WOULD_MISS_SLO", "leave the queue", predicted.queue_s, queue_s)
    return None


def queue_full(queue: AdmissionQueue, entry: Entry, predicted: Forecast) -> Refusal:
    """The refusal of a request for which the queue has no place."""
    message = f"{queue.requests} requests with {queue.prompt_tokens} prompt tokens are waiting"
    # Half of the wait: a client that returns when only one place is free is soon refused again.
    wait_s = None if predicted.wait_s is None else predicted.wait_s / 2
    return Refusal(entry, "QUEUE_FULL", message, retry_after_s(entry.request_id, wait_s, 0.0))


def _too_late(entry: Entry, reason: RefusalReason, what: str, wait_s: float, limit_s: float) -> Refusal:
    message = f"a prompt would {what} in {wait_s:.3g} s; at most {limit_s:.3g} s are allowed"
    return Refusal(entry, reason, message, retry_after_s(entry.request_id, wait_s, limit_s))


MAX_OFFERS = 256
"""Requests that are tried per start, long prompts that wait for their turn included."""
MAX_LOOKS = 8
"""Most requests too large for the free KV that are passed before a start is given up."""
MAX_BYPASSES = 16
"""How many smaller requests may bypass one that is too large for the free KV; after that it blocks the queue."""


class ModelAdmission:
    """All requests of one model between arrival and end. Reads the account of work, and reserves capacity there for the
    requests that it starts.

    The request flow reports output and end of a request first to the account, then to `sent` and `ended`.
    """

    def __init__(
        self, settings: AdmissionConfig, loads: WorkerLoads, local_prefill: LocalPrefill = "never"
    ) -> None:
        """`local_prefill`: the coordinator's setting."""
        self._settings, self.loads, self._local_prefill = settings, loads, local_prefill
        self.queue = AdmissionQueue(settings.max_queued_requests, settings.max_queued_prompt_tokens)
        self.prefill = PrefillCapacity(settings.prefill_horizon_s)
        self.decode = DecodeCapacity(settings.tpot_slo_s)
        self.held_by: Cause = "prefill"
        """What the queue waits for, while it is not empty."""
        self.awaits_workers = False
        """Whether a pool has no worker, and workers are started on demand, for which requests wait."""
        self._smaller_may_fit = False
        """Whether a shorter prompt might have started in place of the last one that did not."""
        self._numbers = 0
        self._held_s: dict[Cause, float] = {"prefill": 0.0, "decode": 0.0, "workers": 0.0}
        self._held_since_s = 0.0
        self._deadlines: list[tuple[float, int, Entry]] = []

    def set_workers(self, snapshot: PoolSnapshot, model: str, on_demand: bool = False) -> None:
        """Replaces the set of workers. `on_demand`: whether workers are started when requests wait for them."""
        loads = self.loads
        self.awaits_workers = on_demand and snapshot.lacks_workers(model)
        self.prefill.set_workers(loads.prefill[worker.key] for worker in snapshot.accepting(model, "prefill"))
        self.decode.set_workers(loads.decode[worker.key] for worker in snapshot.accepting(model, "decode"))

    def arrive(self, entry: Entry, now: float) -> Arrival:
        """Starts a new request if the queue is empty and there is capacity; otherwise queues or refuses it."""
        self._numbers += 1
        entry.number = self._numbers
        if not self.queue.requests:
            if self._try_start(entry, now, queued=False):
                return STARTED
            self._held_since_s = now
        predicted = forecast(entry, self.queue.ahead_of(entry), self.prefill, self.decode)
        if (refusal := refusal_of(self._settings, entry, predicted, now)) is not None:
            entry.number = GONE
            return Arrival(refused=refusal)
        evicted = self.queue.make_room(entry)
        if evicted is None:
            entry.number = GONE
            return Arrival(refused=queue_full(self.queue, entry, predicted))
        self.queue.add(entry)
        self._begin_wait(entry, predicted, now)
        for other in evicted:
            other.number = GONE
        return Arrival(evicted=tuple(queue_full(self.queue, other, predicted) for other in evicted))

    def release(self, now: float) -> Release:
        """Takes out of the queue all requests that can start, and those that have waited too long."""
        refused = self._expired(now)
        started: list[Entry] = []
        while self.queue.requests and (entry := self._next(now)) is not None:
            started.append(entry)
        return Release(tuple(started), tuple(refused))

    def next_release_s(self) -> float:
        """The next time at which `release` must be called even without an event; infinity: never."""
        if not self.queue.requests:
            self._deadlines.clear()
            return float("inf")
        while not self._deadlines[0][2].waits:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0]

    def sent(self, entry: Entry, tokens: int) -> None:
        """Charges output tokens that were sent."""
        self.queue.charge(entry, OUTPUT_TOKEN_COST * tokens)

    def ended(self, entry: Entry) -> None:
        """Takes notice that a request is over, whether it was queued or running. Idempotent."""
        if entry.waits:
            self.queue.remove(entry)
        entry.number = GONE

    def _next(self, now: float) -> Entry | None:
        """Starts the next entry that can start, within the bounds on bypasses and looks."""

        def attempt(entry: Entry) -> Offer:
            if self._try_start(entry, now):
                return Offer.TAKEN
            if not self._smaller_may_fit:
                return Offer.STOP
            # A long prompt waits only for the long one before it: a smaller request that bypasses it does not delay it.
            return Offer.SKIP if self.held_by == "prefill" else Offer.MISFIT

        offers = islice(self.queue.offers(), MAX_OFFERS)
        taken = offer_in_order(offers, attempt, max_bypasses=MAX_BYPASSES, max_looks=MAX_LOOKS)
        return next(taken, None)  # one at a time: serving a request changes the order

    def _try_start(self, entry: Entry, now: float, queued: bool = True) -> bool:
        """Starts an entry if there is capacity; otherwise sets `held_by` and `_smaller_may_fit`."""
        self._smaller_may_fit = False
        if not self.prefill.workers or (entry.needs_decode and not self.decode.workers):
            if self.awaits_workers:
                self._hold("workers", now)
                return False
            self._start(entry, None, None, now, queued)  # the request flow reports the missing workers
            return True
        is_local = self._local_prefill == "always" and entry.needs_decode
        prefill = None if is_local else self.prefill.fit(entry)
        if isinstance(prefill, NoCapacity):
            decode = self._local_worker(entry)
            if decode is None:
                self._hold("prefill", now)
                self._smaller_may_fit = prefill.smaller_may_fit
                return False
            self._start(entry, None, decode, now, queued)
            return True
        prefill_s = prefill.backlog_s + entry.uncached_tokens / prefill.rate if prefill is not None else 0.0
        fitting = self.decode.fit(entry, prefill_s) if entry.needs_decode else None
        if isinstance(fitting, NoCapacity):
            self._hold("decode", now)
            self._smaller_may_fit = fitting.smaller_may_fit
            return False
        self._start(entry, prefill, fitting, now, queued)
        return True

    def _local_worker(self, entry: Entry) -> DecodeLoad | None:
        """The decode worker that is expected to compute the entry's prompt itself while no prefill worker has room."""
        prefill = self.prefill.least_busy
        if self._local_prefill != "auto" or not entry.needs_decode or prefill is None:
            return None
        decode = self.decode.fit(entry, 0.0)
        if isinstance(decode, NoCapacity):
            return None
        cached = entry.prompt_tokens - math.ceil(entry.uncached_tokens)
        cost = PairCost(cached_tokens=cached, decode_cached_tokens=cached)
        tokens = local_prefill_tokens(prefill, decode, entry.prompt_tokens, cost, entry.tpot_slo_s)
        return decode if tokens else None

    def _start(
        self,
        entry: Entry,
        prefill: PrefillLoad | None,
        decode: DecodeLoad | None,
        now: float,
        queued: bool,
    ) -> None:
        """Takes an entry out of the queue if it is `queued`, charges its prompt, reserves its workers' capacity."""
        if queued:
            self._hold(self.held_by, now)
            entry.marks = (
                self._held_s["prefill"] - entry.marks[0],
                self._held_s["decode"] - entry.marks[1],
            )
            self.queue.serve(entry)
        else:
            self.queue.pass_by(entry)
        entry.started = True
        self.loads.reserve(
            entry,
            prefill.key if prefill is not None else None,
            decode.key if decode is not None else None,
            local_tokens=entry.uncached_tokens if prefill is None else 0,
        )

    def _hold(self, cause: Cause, now: float) -> None:
        """Adds the time since the last call to the current cause; from now on the queue waits for `cause`."""
        self._held_s[self.held_by] += max(0.0, now - self._held_since_s) if self.queue.requests else 0.0
        self._held_since_s, self.held_by = now, cause

    def _begin_wait(self, entry: Entry, predicted: Forecast, now: float) -> None:
        """Sets what a newly queued entry's waits are measured from, and when it is refused. `_start` ends that."""
        self._hold(self.held_by, now)
        entry.marks = self._held_s["prefill"], self._held_s["decode"]
        entry.from_zero = self.awaits_workers
        if not entry.from_zero:  # a request that waits for the first workers has only its own deadline
            entry.predicted_ttft_s = predicted.ttft_s or 0.0
            entry.start_by_s = now + queue_limit_s(self._settings, entry, predicted.compute_s)
        heapq.heappush(self._deadlines, (entry.start_by_s, entry.number, entry))

    def _expired(self, now: float) -> list[Refusal]:
        refused = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if not entry.waits:
                continue
            if self.awaits_workers:
                entry.start_by_s = float("inf")
                heapq.heappush(self._deadlines, (entry.start_by_s, entry.number, entry))
                continue
            self.ended(entry)
            message = f"no worker could begin with the prompt within {now - entry.arrived_s:.3g} s"
            hint_s = retry_after_s(entry.request_id, now - entry.arrived_s, 0.0)
            refused.append(Refusal(entry, "WAITED_TOO_LONG", message, hint_s))
        return refused
