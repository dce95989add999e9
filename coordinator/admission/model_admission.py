"""Admission to one model: the queue, the workers' capacity, and the decision about each request. Pure.

Methods take the time as an argument and return what is to be done; `coordinator.admission.controller` does it.
"""

from __future__ import annotations

import heapq
from itertools import islice

from coordinator.admission.decode_capacity import DecodeCapacity
from coordinator.admission.entry import (
    GONE,
    OUTPUT_TOKEN_COST,
    STARTED,
    Arrival,
    Cause,
    Entry,
    Refusal,
    Release,
)
from coordinator.admission.forecast import (
    Bias,
    Forecast,
    forecast,
    queue_full,
    queue_limit_s,
    refusal_of,
    retry_after_s,
)
from coordinator.admission.offer_round import OfferRound
from coordinator.admission.prefill_capacity import PacedTraffic, PrefillCapacity, PrefillPace
from coordinator.admission.queue import AdmissionQueue
from coordinator.admission.too_long import TooLong
from coordinator.workers.load import DecodeLoad, PrefillLoad
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolSnapshot, WorkerKey
from splitserve.config.coordinator import AdmissionConfig
from splitserve.queues import Offer, offer_in_order

MAX_LOOKS = 8
"""Requests tried per release."""
MAX_BYPASSES = 16
"""How many smaller requests may bypass one that does not fit the free KV; after that it blocks the queue."""
_MAX_OFFERS = 256
_MAX_PASSED_OVER = 1024
"""Requests drawn from the queue per look, tried or passed over: what other tenants have held back hides nobody."""
_OVERDUE = 2.0
"""A forecast is learned from after this multiple of it, even if there is no first token yet."""


class ModelAdmission:
    """All requests of one model between arrival and end. Counts them in the ledger as in flight on their workers."""

    def __init__(self, settings: AdmissionConfig, loads: LoadLedger) -> None:
        self._settings, self._loads = settings, loads
        self.queue = AdmissionQueue(settings.max_queued_requests, settings.max_queued_prompt_tokens)
        self.prefill = PrefillCapacity(settings.prefill_horizon_s)
        self.decode = DecodeCapacity(settings.tpot_slo_s, settings.decode_headroom)
        self.held_by: Cause = "prefill"
        """What the queue waits for, while it is not empty."""
        self.awaits_workers = False
        """Whether a pool has no worker, and some are started on demand: what comes waits for them."""
        self._others_may_fit = self._gives_way = False
        self._round = OfferRound(self.prefill, 0.0)
        self.hybrid = False
        """Whether the pair policy decides who computes prompts and who decodes."""
        self.pinned_decodes = 0
        """Decode workers that are not in the prefill capacity already, as those that lean both ways are."""
        self.bounds_prefill = True
        """False while decode workers compute all prompts."""
        # Others overtake late ones: forecasts of the two kinds are wrong by different factors.
        self._biases = {False: Bias(), True: Bias()}
        self._unlearned: list[tuple[float, int, Entry]] = []
        self._too_long = TooLong()
        self._numbers = 0
        self._traffic = PacedTraffic()
        self._held_s: dict[Cause, float] = {"prefill": 0.0, "decode": 0.0, "workers": 0.0}
        self._held_since_s = 0.0
        self._deadlines: list[tuple[float, int, Entry]] = []

    def set_workers(self, snapshot: PoolSnapshot, model: str, on_demand: bool = False) -> None:
        """Replaces the set of workers, which are started `on_demand` or not. The ledger has the load of each."""
        loads = self._loads
        self.awaits_workers = on_demand and snapshot.lacks_workers(model)
        self.prefill.set_workers(loads.prefill[worker.key] for worker in snapshot.serving(model, "prefill"))
        self.decode.set_workers(
            (loads.decode[worker.key] for worker in snapshot.serving(model, "decode")),
            (loads.decode[w.key] for w in snapshot.stand_ins(model, "decode")) if self.hybrid else (),
        )
        self.pinned_decodes = len(self.decode.workers.keys() - self.prefill.workers.keys())

    def arrive(self, entry: Entry, now: float) -> Arrival:
        """Starts a new request if the queue is empty and there is capacity; otherwise queues or refuses it."""
        self._numbers += 1
        entry.number = self._numbers
        self.decode.on_arrival(entry.priority_class, now)
        least_s = None
        if entry.ttft_slo_s is not None and not self.awaits_workers:  # nobody knows yet what those compute
            workers = self.prefill.workers.values(), self.decode.workers.values()
            least_s = self._too_long.least_s(entry, *workers)
        if least_s is None:
            return self._begin(entry, now)
        if (hopeless := self._too_long.refusal(entry, least_s, now)) is not None:
            entry.number = GONE
            return Arrival(refused=hopeless)
        arrival = self._begin(entry, now)
        if arrival.refused is None:
            self._too_long.let_in(entry, now)
        return arrival

    def _begin(self, entry: Entry, now: float) -> Arrival:
        if not self.queue.requests:
            if self._try_start(entry, now, queued=False):
                self._biases[False].relax()
                return STARTED
            self._held_since_s, self._round = now, OfferRound(self.prefill, now)
            self._held(entry)
        elif self._starts_past_late(entry, now):
            return STARTED
        ahead = self.queue.ahead_of(entry, self._pace(now))
        entry.late = ahead.late
        bias = self._biases[entry.late]
        predicted = forecast(entry, ahead, self.prefill, self.decode, bias.value, now)
        if (refusal := refusal_of(self._settings, entry, predicted, now)) is not None:
            bias.relax()
            entry.number = GONE
            return Arrival(refused=refusal)
        evicted = self.queue.make_room(entry)
        if evicted is None:
            entry.number = GONE
            return Arrival(refused=queue_full(self.queue, entry, predicted))
        self.queue.add(entry)
        self._begin_wait(entry, predicted, now)
        self._round.waits(entry)
        for other in evicted:
            other.number = GONE
        return Arrival(evicted=tuple(queue_full(self.queue, other, predicted) for other in evicted))

    def release(self, now: float) -> Release:
        """Takes out of the queue all requests that can start, and those that have waited too long."""
        refused = self._expired(now)
        self._learn_overdue(now)
        started: list[Entry] = []
        while self.queue.requests and (entry := self._next(now)) is not None:
            started.append(entry)
        return Release(tuple(started), tuple(refused))

    def next_release_s(self, now: float) -> float:
        """When `release` may have something to do without any event; infinity: never."""
        if not self.queue.requests:
            self._deadlines.clear()
            return float("inf")
        while not self._deadlines[0][2].waits:
            heapq.heappop(self._deadlines)
        held_s = min(self._round.late_from_s, self._round.patient_until_s)
        return min(self._deadlines[0][0], self.prefill.next_change_s(now), held_s)

    def routed(self, entry: Entry, prefill: WorkerKey, decode: WorkerKey | None, now: float) -> None:
        """An attempt was routed to these workers. A further attempt computes the prompt again."""
        if (entry.on_host or entry.prefill == prefill) and entry.decode == decode and not entry.computed:
            return
        self._remove_flight(entry)
        self._traffic.began(entry)
        entry.on_host &= self._loads.in_host_pair(decode) and not entry.computed
        entry.computed, entry.prefill, entry.decode = False, None if entry.on_host else prefill, decode
        if not entry.on_host and (prefill_load := self._loads.prefill.get(prefill)) is not None:
            self.prefill.add_flight(prefill_load, entry, now)
        if decode is not None and (decode_load := self._loads.decode.get(decode)) is not None:
            decode_load.add_flight(entry)

    def sent(self, entry: Entry, tokens: int, now: float) -> bool:
        """Output tokens were sent. True if they are the first, which frees capacity on the prefill worker."""
        first = not entry.computed
        if first:
            self._leave_prefill(entry)
            self._learn_overdue(now)
            if not entry.learned:
                self._biases[entry.late].learn(entry.predicted_ttft_s, now - entry.arrived_s)
            entry.predicted_ttft_s = 0.0
            entry.computed = True
        entry.sent += tokens
        if entry.decode is not None and (decode_load := self._loads.decode.get(entry.decode)) is not None:
            decode_load.grow_flight(entry, tokens, first)
        self.queue.charge(entry, OUTPUT_TOKEN_COST * tokens)
        return first

    def decoded(self, entry: Entry) -> None:
        """The decode worker holds nothing for the entry any more."""
        if entry.decode is not None and (decode_load := self._loads.decode.get(entry.decode)) is not None:
            decode_load.remove_flight(entry)
        entry.decode = None
        self._traffic.ended(entry)

    def ended(self, entry: Entry) -> None:
        """The request is over, whether it was queued or running."""
        self._traffic.ended(entry)
        if entry.started:
            self._remove_flight(entry)
        elif entry.number != GONE:
            self.queue.remove(entry)
        entry.number = GONE

    def _next(self, now: float) -> Entry | None:
        """Starts the next entry that can start, within the bounds on bypasses and looks."""
        round_ = self._round = OfferRound(self.prefill, now)

        def attempt(entry: Entry) -> Offer:
            return Offer.TAKEN if self._try_start(entry, now) else self._held(entry)

        drawn = islice(self.queue.offers(self._pace(now)), _MAX_PASSED_OVER)
        offers = islice((entry for entry in drawn if not round_.passes_over(entry)), _MAX_OFFERS)
        taken = offer_in_order(offers, attempt, max_bypasses=MAX_BYPASSES, max_looks=MAX_LOOKS)
        return next(taken, None)  # one at a time: serving a request changes the order

    def _pace(self, now: float) -> PrefillPace | None:
        return self.prefill.pace(now, self.decode.place_s if self.held_by == "decode" else 0.0)

    def _held(self, entry: Entry) -> Offer:
        return self._round.hold(entry, self.held_by == "prefill", self._others_may_fit, self._gives_way)

    def _starts_past_late(self, entry: Entry, now: float) -> bool:
        """Starts a newcomer though others wait, if these are all late, for want of a place that it does not need."""
        late = now >= self.prefill.late_rates().everywhere_s(entry)
        if not self._round.only_late or late or self._round.gives_way(entry):
            return False
        self._mark(entry, now)
        self.queue.add(entry)
        if self._try_start(entry, now):
            return True
        self.queue.remove(entry)
        self._round.only_late = False
        return False

    def _try_start(self, entry: Entry, now: float, queued: bool = True) -> bool:
        """Starts an entry if there is capacity; otherwise sets `held_by` and `_others_may_fit`."""
        self._others_may_fit = self._gives_way = False
        decodes, paced = self.decode.workers.keys(), self.hybrid and self.bounds_prefill
        entry.on_host = paced and self._traffic.on_host(entry, self.prefill, decodes)
        if not self.prefill.workers or (entry.needs_decode and not self.decode.workers):
            if self.awaits_workers:
                self._hold("workers", now)
                return False
            self._start(entry, None, None, now, queued)  # the request flow reports the missing workers
            return True
        prefill_load = None if entry.on_host else self.prefill.fit(entry, now)
        if prefill_load is None and self.bounds_prefill and not entry.on_host:
            self._hold("prefill", now)
            self._others_may_fit = self.prefill.held_by_long or self.prefill.held_by_late
            return False
        decode_load: DecodeLoad | None = None
        if entry.needs_decode:
            prefill_s = 0.0
            if prefill_load is not None:
                begin_s = max(prefill_load.backlog_s(now), entry.read_s)
                prefill_s = begin_s + entry.uncached_tokens / prefill_load.rate
            found = self.decode.fit(entry, prefill_s, now, is_paced=entry.on_host)
            if not isinstance(found, DecodeLoad):
                self._hold("decode", now)
                self._others_may_fit, self._gives_way = found.smaller_may_fit, found.held_by_late
                return False
            decode_load = found
        self._start(entry, prefill_load, decode_load, now, queued)
        return True

    def _start(
        self,
        entry: Entry,
        prefill: PrefillLoad | None,
        decode: DecodeLoad | None,
        now: float,
        queued: bool,
    ) -> None:
        """Takes an entry out of the queue if it is `queued`, charges its prompt, counts it on its workers."""
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
        self._traffic.began(entry)
        if prefill is not None:
            entry.prefill = prefill.key
            self.prefill.add_flight(prefill, entry, now)
        if decode is not None:
            entry.decode = decode.key
            decode.add_flight(entry)

    def _hold(self, cause: Cause, now: float) -> None:
        """Adds the time since the last call to the current cause; from now on the queue waits for `cause`."""
        self._held_s[self.held_by] += max(0.0, now - self._held_since_s) if self.queue.requests else 0.0
        self._held_since_s, self.held_by = now, cause

    def _mark(self, entry: Entry, now: float) -> None:
        """Begins to measure what an entry waits for; `_start` ends it."""
        self._hold(self.held_by, now)
        entry.marks = self._held_s["prefill"], self._held_s["decode"]

    def _remove_flight(self, entry: Entry) -> None:
        self._leave_prefill(entry)
        self.decoded(entry)

    def _leave_prefill(self, entry: Entry) -> None:
        if entry.prefill is not None and (prefill_load := self._loads.prefill.get(entry.prefill)) is not None:
            prefill_load.remove_flight(entry)

    def _begin_wait(self, entry: Entry, predicted: Forecast, now: float) -> None:
        """Sets what a newly queued entry's end of waiting is measured against."""
        self._traffic.began(entry)
        self._mark(entry, now)
        entry.from_zero = self.awaits_workers
        if entry.from_zero:  # its own deadline bounds it, and a cold start is no wait to learn from
            heapq.heappush(self._deadlines, (entry.start_by_s, entry.number, entry))
            return
        entry.predicted_ttft_s = (predicted.ttft_s or 0.0) / self._biases[entry.late].value
        if predicted.ttft_s:
            heapq.heappush(self._unlearned, (now + _OVERDUE * predicted.ttft_s, entry.number, entry))
        entry.start_by_s = now + queue_limit_s(self._settings, entry, predicted.compute_s)
        heapq.heappush(self._deadlines, (entry.start_by_s, entry.number, entry))

    def _learn_overdue(self, now: float) -> None:
        """Learns from those that wait much longer than was forecast: what comes first is what was in time."""
        while self._unlearned and self._unlearned[0][0] <= now:
            entry = heapq.heappop(self._unlearned)[2]
            if not (entry.computed or entry.learned or entry.number == GONE):
                self._biases[entry.late].learn_at_least(entry.predicted_ttft_s, now - entry.arrived_s)
                entry.learned = True

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
            # Learning from admitted requests alone would be too optimistic.
            self._biases[entry.late].learn_at_least(entry.predicted_ttft_s, now - entry.arrived_s)
            entry.learned = True
            message = f"no worker could begin with the prompt within {now - entry.arrived_s:.3g} s"
            hint_s = retry_after_s(entry.request_id, now - entry.arrived_s, 0.0)
            refused.append(Refusal(entry, "WAITED_TOO_LONG", message, hint_s))
        return refused
