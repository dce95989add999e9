"""Admission to one model: the queue, what the workers have room for, and what becomes of a request. Pure.

Every method takes the time where it needs it and says what is to be done; `coordinator.admission.gate` does it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from coordinator.admission.decode_room import DecodeLane, DecodeRoom
from coordinator.admission.entry import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, Entry
from coordinator.admission.forecast import Bias, Forecast, forecast, retry_after_s
from coordinator.admission.prefill_room import PrefillLane, PrefillRoom
from coordinator.admission.queue import AdmissionQueue
from coordinator.admission.refusal import Refusal, RefusalReason
from coordinator.pools import PoolSnapshot, Worker, WorkerKey
from splitserve.admission_settings import AdmissionConfig

Cause = Literal["prefill", "decode"]
MAX_LOOKS = 8
"""Requests tried a round."""
MAX_BYPASSES = 16
"""How many smaller ones may be let past a request that does not fit the free KV; then it holds the queue up."""
GONE = -1
"""Number of an entry that is neither in the queue nor at the workers."""
_MAX_OFFERS = 256
_CAUTION = 0.85
"""Share of an allowed wait that a forecast may fill: it is right on average only."""
_LEAST_SLO_SHARE = 0.25
"""A prompt that takes nearly all of the TTFT target, or more, may still wait for this share of it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What becomes of a newcomer: it waits unless it has started or is refused."""

    started: bool = False
    refused: Refusal | None = None
    evicted: tuple[Refusal, ...] = ()
    """Others that had to leave the queue for it."""


_STARTED = Arrival(started=True)


@dataclass(frozen=True, slots=True)
class Release:
    """Who leaves the queue."""

    started: tuple[Entry, ...] = ()
    refused: tuple[Refusal, ...] = ()


class ModelAdmission:
    """All requests of one model between arrival and end."""

    def __init__(self, settings: AdmissionConfig) -> None:
        self._settings = settings
        self.queue = AdmissionQueue(settings.max_queued_requests, settings.max_queued_prompt_tokens)
        self.prefill = PrefillRoom(settings.prefill_horizon_s)
        self.decode = DecodeRoom(settings.tpot_slo_s, settings.decode_headroom)
        self.held_by: Cause = "prefill"
        """What the queue waits for, while there is one."""
        self._others_may_fit = False
        self.bounds_prefill = True
        """False while decode workers compute all prompts."""
        self._bias = Bias()
        self._numbers = 0
        self._held_s: dict[Cause, float] = {"prefill": 0.0, "decode": 0.0}
        self._held_since_s = 0.0
        self._late: list[tuple[float, int, Entry]] = []

    def renew(self, snapshot: PoolSnapshot, model: str) -> None:
        """The workers are these now."""
        self.prefill.renew(snapshot.accepting(model, "prefill"))
        self.decode.renew(snapshot.accepting(model, "decode"))

    def hear(self, worker: Worker) -> None:
        """A load report has come."""
        if (prefill := self.prefill.lanes.get(worker.key)) is not None:
            prefill.hear(worker)
        elif (decode := self.decode.lanes.get(worker.key)) is not None:
            decode.hear(worker)

    def arrive(self, entry: Entry, now: float) -> Arrival:
        """Starts the newcomer if nobody is before it and there is room; else queues or refuses it."""
        self._numbers += 1
        entry.number = self._numbers
        self.decode.saw(entry.priority_class, now)
        if not self.queue.requests:
            if self._try_start(entry, now, queued=False):
                self._bias.relax()
                return _STARTED
            self._held_since_s = now
        ahead = self.queue.ahead_of(entry)
        seen = forecast(entry, ahead, self.prefill, self.decode, self._bias.value, now)
        if (refusal := self._refusal(entry, seen, now)) is not None:
            self._bias.relax()
            return Arrival(refused=refusal)
        evicted = self.queue.make_room(entry)
        if evicted is None:
            return Arrival(refused=self._full(entry, seen))
        self.queue.add(entry)
        self._note_wait(entry, seen, now)
        for other in evicted:
            other.number = GONE
        return Arrival(evicted=tuple(self._full(other, seen) for other in evicted))

    def release(self, now: float) -> Release:
        """Lets everybody go who can start soon, or who has waited too long."""
        refused = self._expired(now)
        started: list[Entry] = []
        while self.queue.requests:
            entry = self._next(now)
            if entry is None:
                break
            started.append(entry)
        return Release(tuple(started), tuple(refused))

    def next_look_s(self, now: float) -> float:
        """When `release` can do something though nothing has happened; infinity: never."""
        if not self.queue.requests:
            self._late.clear()
            return float("inf")
        while not self._waits(self._late[0][2]):
            heapq.heappop(self._late)
        return min(self._late[0][0], self.prefill.next_long_s(now))

    def routed(self, entry: Entry, prefill: WorkerKey, decode: WorkerKey | None, now: float) -> None:
        """An attempt goes to these workers. A further attempt computes the prompt anew."""
        if entry.prefill == prefill and entry.decode == decode and not entry.computed:
            return
        self._give_back(entry)
        entry.computed, entry.prefill, entry.decode = False, prefill, decode
        self.prefill.take(prefill, entry, now)
        if decode is not None and (target := self.decode.lanes.get(decode)) is not None:
            target.take(entry)

    def sent(self, entry: Entry, tokens: int, now: float) -> bool:
        """Tokens go to the client; whether these are the first ones, so that the prefill worker has room."""
        first = not entry.computed
        if first:
            if entry.prefill is not None and (lane := self.prefill.lanes.get(entry.prefill)) is not None:
                lane.give_back(entry)
            self._bias.learn(entry.predicted_ttft_s, now - entry.arrived_s)
            entry.predicted_ttft_s = 0.0
            entry.computed = True
        entry.sent += tokens
        if entry.decode is not None and (target := self.decode.lanes.get(entry.decode)) is not None:
            target.grown(entry, tokens, first)
        self.queue.charge(entry, OUTPUT_TOKEN_COST * tokens)
        return first

    def decoded(self, entry: Entry) -> None:
        """The decode worker holds nothing for it any more."""
        if entry.decode is not None and (target := self.decode.lanes.get(entry.decode)) is not None:
            target.give_back(entry)
        entry.decode = None

    def ended(self, entry: Entry) -> None:
        """The request is over, wherever it was."""
        if entry.started:
            self._give_back(entry)
        elif entry.number != GONE:
            self.queue.remove(entry)
        entry.number = GONE

    def _next(self, now: float) -> Entry | None:
        skipped: list[Entry] = []
        least_long = float("inf")
        for entry in islice(self.queue.offers(), _MAX_OFFERS):
            if entry.uncached_tokens >= least_long:
                continue  # long prompts wait for each other only, so that no bypass can starve them
            if self._try_start(entry, now):
                for other in skipped:
                    other.bypassed += 1
                return entry
            if not self._others_may_fit:
                return None
            if self.prefill.held_by_long:
                least_long = entry.uncached_tokens
                continue
            skipped.append(entry)
            if entry.bypassed >= MAX_BYPASSES or len(skipped) == MAX_LOOKS:
                return None
        return None

    def _try_start(self, entry: Entry, now: float, queued: bool = True) -> bool:
        """Starts an entry if there is room; else says why not in `held_by` and `_others_may_fit`."""
        self._others_may_fit = False
        if not self.prefill.lanes or (entry.needs_decode and not self.decode.lanes):
            self._start(entry, None, None, now, queued)  # who is missing is told by the request flow
            return True
        lane = self.prefill.fit(entry, now)
        if lane is None and self.bounds_prefill:
            self._hold("prefill", now)
            self._others_may_fit = self.prefill.held_by_long
            return False
        target: DecodeLane | None = None
        if entry.needs_decode:
            prefill_s = lane.backlog_s(now) + entry.uncached_tokens / lane.rate if lane is not None else 0.0
            found = self.decode.fit(entry, prefill_s, now)
            if not isinstance(found, DecodeLane):
                self._hold("decode", now)
                self._others_may_fit = found.smaller_may_fit
                return False
            target = found
        self._start(entry, lane, target, now, queued)
        return True

    def _start(
        self,
        entry: Entry,
        prefill: PrefillLane | None,
        decode: DecodeLane | None,
        now: float,
        queued: bool,
    ) -> None:
        if queued:
            self._hold(self.held_by, now)
            entry.marks = (
                self._held_s["prefill"] - entry.marks[0],
                self._held_s["decode"] - entry.marks[1],
            )
            self.queue.remove(entry)
        else:
            self.queue.pass_by(entry)
        self.queue.charge(entry, PROMPT_TOKEN_COST * entry.prompt_tokens)
        entry.started = True
        if prefill is not None:
            entry.prefill = prefill.key
            self.prefill.take(prefill.key, entry, now)
        if decode is not None:
            entry.decode = decode.key
            decode.take(entry)

    def _waits(self, entry: Entry) -> bool:
        return not entry.started and entry.number != GONE

    def _hold(self, cause: Cause, now: float) -> None:
        self._held_s[self.held_by] += max(0.0, now - self._held_since_s) if self.queue.requests else 0.0
        self._held_since_s, self.held_by = now, cause

    def _give_back(self, entry: Entry) -> None:
        if entry.prefill is not None and (lane := self.prefill.lanes.get(entry.prefill)) is not None:
            lane.give_back(entry)
        self.decoded(entry)

    def _note_wait(self, entry: Entry, seen: Forecast, now: float) -> None:
        self._hold(self.held_by, now)
        entry.marks = self._held_s["prefill"], self._held_s["decode"]
        entry.predicted_ttft_s = (seen.ttft_s or 0.0) / self._bias.value
        entry.start_by_s = now + self._queue_limit_s(entry, seen.compute_s)
        heapq.heappush(self._late, (entry.start_by_s, entry.number, entry))

    def _slo_wait_s(self, entry: Entry, compute_s: float) -> float:
        """How long a request may wait for its prompt to begin; batch has no TTFT target."""
        slo_s = self._settings.ttft_slo_s
        if slo_s is None or entry.priority_class == "batch":
            return float("inf")
        return max(slo_s - compute_s, _LEAST_SLO_SHARE * slo_s)

    def _queue_limit_s(self, entry: Entry, compute_s: float) -> float:
        """How long it may stay in the queue: on its worker it may wait again, for as long as the horizon."""
        slo_s = self._slo_wait_s(entry, compute_s)
        return min(self._settings.max_queue_s, max(slo_s - self._settings.prefill_horizon_s, slo_s / 2))

    def _refusal(self, entry: Entry, seen: Forecast, now: float) -> Refusal | None:
        if seen.wait_s is None:
            return None
        left_s = entry.deadline_s - now
        slo_s = _CAUTION * min(self._settings.max_queue_s, self._slo_wait_s(entry, seen.compute_s))
        queue_s = _CAUTION * self._queue_limit_s(entry, seen.compute_s)
        if seen.wait_s + seen.compute_s > left_s:
            return _too_late(
                entry, "WOULD_MISS_DEADLINE", "begin", seen.wait_s, max(0.0, left_s - seen.compute_s)
            )
        if seen.wait_s > slo_s:
            return _too_late(entry, "WOULD_MISS_SLO", "begin", seen.wait_s, slo_s)
        if seen.queue_s > queue_s:
            return _too_late(entry, "WOULD_MISS_SLO", "leave the queue", seen.queue_s, queue_s)
        return None

    def _full(self, entry: Entry, seen: Forecast) -> Refusal:
        message = f"{self.queue.requests} requests with {self.queue.prompt_tokens} prompt tokens are waiting"
        # Half of the queue: who comes back to a queue that is just not full is refused again soon.
        wait_s = None if seen.wait_s is None else seen.wait_s / 2
        return Refusal(entry, "QUEUE_FULL", message, retry_after_s(entry.request_id, wait_s, 0.0))

    def _expired(self, now: float) -> list[Refusal]:
        refused = []
        while self._late and self._late[0][0] <= now:
            entry = heapq.heappop(self._late)[2]
            if not self._waits(entry):
                continue
            self.ended(entry)
            # Those that were served would alone show too bright a picture.
            self._bias.learn_at_least(entry.predicted_ttft_s, now - entry.arrived_s)
            message = f"no worker could begin with the prompt within {now - entry.arrived_s:.3g} s"
            hint_s = retry_after_s(entry.request_id, now - entry.arrived_s, 0.0)
            refused.append(Refusal(entry, "WAITED_TOO_LONG", message, hint_s))
        return refused


def _too_late(entry: Entry, reason: RefusalReason, what: str, wait_s: float, limit_s: float) -> Refusal:
    message = f"a prompt would {what} in {wait_s:.3g} s; at most {limit_s:.3g} s are allowed"
    return Refusal(entry, reason, message, retry_after_s(entry.request_id, wait_s, limit_s))
