"""Whether prefill workers have capacity to start one more prompt soon. Pure; time is an argument.

A worker is sent as many tokens as it computes within a horizon. Long prompts, above half of that, are handled apart:
one at a time per worker, the next when the first is nearly done. Half of the horizon then stays available for short
prompts, which bypass long ones in the engine. Prompts that cannot be in time any more have a horizon of their own where
the engine serves them last: those that can do not wait for them here either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.admission.entry import Entry
from coordinator.workers.load import Flight, PrefillLoad
from coordinator.workers.snapshot import WorkerKey

NEARLY_DONE_S = 0.05
"""How long before the predicted end of a long prompt the next one is sent: time to reserve KV and to deliver it."""


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """What prompts take at a time: seconds of the work that workers have, and of a token in the whole pool and on one
    worker.

    `place_s`: seconds from one place on decode workers that becomes free to the next, while prompts wait for those.
    """

    now: float
    ahead_s: float
    pool_token_s: float
    worker_token_s: float
    place_s: float = 0.0

    def share(self, share: float) -> PrefillPace:
        """The pace of those who get this share of the pool, above 0, up to 1."""
        return replace(self, pool_token_s=self.pool_token_s / share, place_s=self.place_s / share)


@dataclass(frozen=True, slots=True)
class LateRates:
    """When prompts are late on the workers that serve such prompts last, by their rates: tokens per second, ascending.
    `on_all`: all workers do. O(log workers) for a prompt."""

    rates: Sequence[float]
    on_all: bool

    def everywhere_s(self, flight: Flight) -> float:
        """From when on a prompt cannot be in time on any worker, where all serve such prompts last; infinity: never."""
        return flight.begin_by_s(self.rates[-1]) if self.on_all and self.rates else float("inf")

    def next_s(self, flight: Flight, now: float) -> float:
        """When a prompt that waits cannot be in time any more on one more of these workers: it then has the place of
        those there. Infinity: never."""
        slowest = bisect_right(self.rates, now, key=flight.begin_by_s)
        return flight.begin_by_s(self.rates[slowest]) if slowest < len(self.rates) else float("inf")


class PrefillCapacity:
    """Capacity of one model's prefill workers that take new requests.

    While decode workers compute prompts too, `stretch` multiplies `horizon_s`, and each worker is sent so many long
    prompts more at a time as there are `helpers`: who computes a prompt is decided once it has left the queue.
    """

    def __init__(self, horizon_s: float) -> None:
        self.workers: dict[WorkerKey, PrefillLoad] = {}
        self.horizon_s = horizon_s
        self.stretch, self.helpers = 1.0, 0
        self.held_by_long = False
        """Whether the last `fit` failed only because a worker takes one long prompt at a time."""
        self.held_by_late = False
        """Whether it failed only because workers have enough prompts that cannot be in time."""

    def set_workers(self, loads: Iterable[PrefillLoad]) -> None:
        """Replaces the set of workers."""
        self.workers = {load.key: load for load in loads}

    def set_help(self, decodes: int, share: float, is_lent: bool) -> None:
        """So many decode workers compute `share` of the prompts, 0..1, too; `is_lent`: whatever their length."""
        each = decodes / len(self.workers) if self.workers else 0.0
        self.stretch = 1.0 + share * each
        self.helpers = int(each) if is_lent else 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second of all workers together; None until one of them has measured its rate."""
        rates = [load.rate for load in self.workers.values() if load.measured_rate]
        return sum(rates) / len(rates) * len(self.workers) if rates else None

    def pace(self, now: float, place_s: float = 0.0) -> PrefillPace | None:
        """What prompts that wait here will take; None until a rate has been measured. `place_s`: see `PrefillPace`."""
        rate = self.rate
        if rate is None:
            return None
        return PrefillPace(now, self.backlog_s(now), 1 / rate, len(self.workers) / rate, place_s)

    def backlog_s(self, now: float) -> float:
        """Mean backlog of the workers, in seconds, of prompts that can be in time."""
        self._set_late_aside(now)
        return sum(load.backlog_s(now) for load in self.workers.values()) / max(1, len(self.workers))

    def fit(self, flight: Flight, now: float) -> PrefillLoad | None:
        """The worker with the least backlog that can start the request soon; None if there is none."""
        best: PrefillLoad | None = None
        best_s = 0.0
        self.held_by_long = self.held_by_late = False
        self._set_late_aside(now)
        for load in self.workers.values():
            is_long, is_late = self.is_long(load, flight), load.will_be_late(flight, now)
            if not self._has_room(load, flight, is_long, is_late, now):
                self.held_by_late |= is_late
                self.held_by_long |= is_long and not is_late
                continue
            busy_s = load.backlog_s(now)
            if best is None or busy_s < best_s:
                best, best_s = load, busy_s
        if best is not None:
            self.held_by_long = self.held_by_late = False
        return best

    def late_rates(self) -> LateRates:
        """Of the workers as they are now. O(workers)."""
        rates = [load.rate for load in self.workers.values() if load.orders_prompts]
        return LateRates(sorted(rates), len(rates) == len(self.workers))

    def add_flight(self, load: PrefillLoad, flight: Flight, now: float) -> None:
        """Counts a request as in flight on a worker."""
        load.add_flight(flight, self.is_long(load, flight), now, self.helpers)

    def is_long(self, load: PrefillLoad, flight: Flight) -> bool:
        """Whether the prompt is long for that worker."""
        return flight.uncached_tokens > load.rate * self.horizon_s / 2

    def next_change_s(self, now: float) -> float:
        """When the next long prompt may be sent, unless a running one ends earlier, or a prompt will be late; infinity:
        unknown."""
        full = 1 + self.helpers
        times_s = [
            load.long_until_s - NEARLY_DONE_S for load in self.workers.values() if len(load.long) == full
        ]
        times_s += [load.late_from_s for load in self.workers.values()]
        return min((each_s for each_s in times_s if each_s > now), default=float("inf"))

    def _set_late_aside(self, now: float) -> None:
        for load in self.workers.values():
            load.set_late_aside(now)

    def _has_room(self, load: PrefillLoad, flight: Flight, is_long: bool, is_late: bool, now: float) -> bool:
        if not load.requests:
            return True
        if load.requests >= load.slots:
            return False
        if is_late:
            room = load.rate * self.horizon_s * self.stretch
            return not load.late or load.late_tokens + flight.uncached_tokens <= room
        if is_long:
            more = 1 + self.helpers - len(load.long)
            return more > 0 or (more == 0 and now >= load.long_until_s - NEARLY_DONE_S)
        horizon = load.rate * self.horizon_s * self.stretch
        room = horizon / 2 if load.long else horizon
        too_late = max(0.0, load.late_tokens - horizon)  # sent in time: what is late beyond its own horizon
        return load.short_tokens + load.others + too_late + flight.uncached_tokens <= room


class PacedTraffic:
    """Says which requests go to a host pair at once, because the engine there both orders their prompts and paces their
    streams, and what waits here for that comes too late.

    While there are others (without targets, or refused rather than served late) all wait here for their turns, and
    while there are requests of several tenants: an engine knows nothing of their shares.
    """

    def __init__(self) -> None:
        self._others: set[Entry] = set()
        self._of_tenants: defaultdict[str, set[Entry]] = defaultdict(set)

    def began(self, entry: Entry) -> None:
        """It is queued, or workers are to serve it. Idempotent."""
        self._of_tenants[entry.tenant].add(entry)
        if not _is_paced(entry):
            self._others.add(entry)

    def ended(self, entry: Entry) -> None:
        """It is over, or no worker has anything of it any more. Idempotent."""
        self._others.discard(entry)
        self._of_tenants[entry.tenant].discard(entry)
        if not self._of_tenants[entry.tenant]:
            del self._of_tenants[entry.tenant]

    def on_host(self, entry: Entry, prefill: PrefillCapacity, decodes: Set[WorkerKey]) -> bool:
        """Whether a decode worker is to compute the prompt on all cores of its host, whichever prefill worker it is
        paired with. `decodes`: those that take new requests; they are all of host pairs then."""
        if not (entry.needs_decode and _is_paced(entry)) or self._others:
            return False
        if not self._of_tenants.keys() <= {entry.tenant}:
            return False
        peers = [load.host_peer for load in prefill.workers.values()]
        return (
            decodes == {peer.key for peer in peers if peer is not None and peer.has_host}
            and None not in peers
        )


def _is_paced(entry: Entry) -> bool:
    """Whether an engine orders its prompt and paces its stream, and it is served however late."""
    return entry.due_s < float("inf") and entry.tpot_slo_s is not None and entry.ttft_slo_s is None
