"""How much more the prefill workers can be sent so that they start it soon. Pure; time is an argument.

A worker is sent as many tokens as it computes in a horizon. A long prompt, one above half of that, is in a class of its
own: one at a time to a worker, the next one when the first is nearly done, and half of the horizon stays for short
prompts, because the engine lets them past.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.admission.entry import Entry
from coordinator.pools import Worker, WorkerKey
from coordinator.route_scores import DEFAULT_PREFILL_TOKENS_PER_S

NEARLY_DONE_S = 0.05
"""How long before its predicted end a long prompt is followed by the next: time to reserve KV and to send it."""


@dataclass(eq=False, slots=True)
class PrefillLane:
    """One worker: what was sent there and has no first token yet."""

    key: WorkerKey
    max_requests: int
    rate: float = DEFAULT_PREFILL_TOKENS_PER_S
    measured: bool = False
    others: float = 0.0
    """Tokens that it computes for other coordinators."""
    short: dict[Entry, None] = field(default_factory=dict)
    long: dict[Entry, None] = field(default_factory=dict)
    short_tokens: float = 0.0
    prompt_tokens: int = 0
    long_until_s: float = 0.0
    """When the last long prompt is predicted to end, were there nothing beside it."""
    _others_seen: float = 0.0

    @property
    def requests(self) -> int:
        """Requests sent there that have no first token yet."""
        return len(self.short) + len(self.long)

    def backlog_s(self, now: float) -> float:
        """Seconds of work that it has."""
        long_s = max(0.0, self.long_until_s - now) if self.long else 0.0
        return (self.short_tokens + self.others) / self.rate + long_s

    def hear(self, worker: Worker) -> None:
        """Takes a load report. What it has beyond what was sent from here, twice in a row, is others' work."""
        rate = worker.load.prefill_tokens_per_second
        self.measured = rate > 0
        self.rate = rate or DEFAULT_PREFILL_TOKENS_PER_S
        beyond = max(0.0, float(worker.load.waiting_tokens - self.prompt_tokens))
        self.others, self._others_seen = min(beyond, self._others_seen), beyond

    def take(self, entry: Entry, is_long: bool, now: float) -> None:
        """Counts an entry as sent there."""
        self.prompt_tokens += entry.prompt_tokens
        if is_long:
            begin_s = max(now, self.long_until_s) if self.long else now
            self.long[entry] = None
            self.long_until_s = begin_s + entry.uncached_tokens / self.rate
        else:
            self.short[entry] = None
            self.short_tokens += entry.uncached_tokens

    def give_back(self, entry: Entry) -> None:
        """Its prompt has been computed, or is no longer wanted."""
        if entry in self.short:
            del self.short[entry]
            self.short_tokens = self.short_tokens - entry.uncached_tokens if self.short else 0.0
        elif entry in self.long:
            del self.long[entry]
        else:
            return
        self.prompt_tokens -= entry.prompt_tokens


class PrefillRoom:
    """The lanes of one model. `horizon_s` may be stretched while decode workers compute prompts too."""

    def __init__(self, horizon_s: float) -> None:
        self.lanes: dict[WorkerKey, PrefillLane] = {}
        self.horizon_s = horizon_s
        self.stretch = 1.0
        self.held_by_long = False
        """Whether the last `fit` failed only because long prompts go one by one."""

    def renew(self, workers: Iterable[Worker]) -> None:
        """Sets which workers there are; known ones keep what they have."""
        before, self.lanes = self.lanes, {}
        for worker in workers:
            lane = before.get(worker.key) or PrefillLane(worker.key, worker.max_running_requests)
            if not lane.measured:
                lane.hear(worker)
            self.lanes[worker.key] = lane

    @property
    def rate(self) -> float | None:
        """Prompt tokens a second of all workers; None until one of them has measured its own."""
        rates = [lane.rate for lane in self.lanes.values() if lane.measured]
        return sum(rates) / len(rates) * len(self.lanes) if rates else None

    def backlog_s(self, now: float) -> float:
        """Seconds of work that the workers have, on average."""
        return sum(lane.backlog_s(now) for lane in self.lanes.values()) / max(1, len(self.lanes))

    def fit(self, entry: Entry, now: float) -> PrefillLane | None:
        """The least busy worker that can start it soon."""
        best: PrefillLane | None = None
        best_s = 0.0
        self.held_by_long = False
        for lane in self.lanes.values():
            is_long = self.is_long(lane, entry)
            if not self._has_room(lane, entry, is_long, now):
                self.held_by_long = self.held_by_long or is_long
                continue
            busy_s = lane.backlog_s(now)
            if best is None or busy_s < best_s:
                best, best_s = lane, busy_s
        return best

    def take(self, key: WorkerKey, entry: Entry, now: float) -> None:
        """Counts an entry as sent to a worker, if it is still there."""
        if (lane := self.lanes.get(key)) is not None:
            lane.take(entry, self.is_long(lane, entry), now)

    def is_long(self, lane: PrefillLane, entry: Entry) -> bool:
        """Whether the prompt is a long one for that worker."""
        return entry.uncached_tokens > lane.rate * self.horizon_s / 2

    def next_long_s(self, now: float) -> float:
        """When a further long prompt may be sent, unless an earlier one ends before that."""
        ends = [lane.long_until_s - NEARLY_DONE_S for lane in self.lanes.values() if len(lane.long) == 1]
        return min((end_s for end_s in ends if end_s > now), default=float("inf"))

    def _has_room(self, lane: PrefillLane, entry: Entry, is_long: bool, now: float) -> bool:
        if not lane.requests:
            return True
        if lane.requests >= lane.max_requests:
            return False
        if is_long:
            return not lane.long or (len(lane.long) == 1 and now >= lane.long_until_s - NEARLY_DONE_S)
        horizon = lane.rate * self.horizon_s * self.stretch
        room = horizon / 2 if lane.long else horizon
        return lane.short_tokens + lane.others + entry.uncached_tokens <= room
