"""Running totals of one coordinator's counters, and what they grew by in a window. Pure; time is an argument.

Coordinators count from their boot. Here the increments between looks are added up, so that totals only grow: a
restart of the coordinator, seen by its id, counts from zero and takes nothing back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoscaler.histogram import LATENCY_BOUNDS_S, Histogram
from splitserve.v1 import scaling_pb2

READ_PHASES: tuple[int, ...] = (
    scaling_pb2.PHASE_RESERVE,
    scaling_pb2.PHASE_PREFILL,
    scaling_pb2.PHASE_TRANSFER,
    scaling_pb2.PHASE_TTFT,
    scaling_pb2.PHASE_TPOT,
)
EMPTY = Histogram(LATENCY_BOUNDS_S, (0.0,) * (len(LATENCY_BOUNDS_S) + 1))


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrived: requests, and tokens of three kinds."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return self.combined(other, 1.0)

    def combined(self, other: Demand, share: float) -> Demand:
        """This, and so much of the other."""
        return Demand(
            self.requests + other.requests * share,
            self.prompt_tokens + other.prompt_tokens * share,
            self.uncached_tokens + other.uncached_tokens * share,
            self.output_tokens + other.output_tokens * share,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment, by phase, and demand."""

    phases: Mapping[int, Histogram]
    demand: Demand

    def __add__(self, other: Totals) -> Totals:
        phases = {phase: self.phases[phase] + other.phases[phase] for phase in READ_PHASES}
        return Totals(phases, self.demand + other.demand)

    def since(self, earlier: Totals) -> Totals:
        """What came since `earlier`, of the same boot."""
        phases = {phase: self.phases[phase] - earlier.phases[phase] for phase in READ_PHASES}
        return Totals(phases, self.demand.combined(earlier.demand, -1.0))


NOTHING = Totals(dict.fromkeys(READ_PHASES, EMPTY), Demand())


def totals_of(models: Iterable[scaling_pb2.ModelSignals]) -> Totals:
    """The counters of these models together."""
    total = NOTHING
    for model in models:
        phases = dict.fromkeys(READ_PHASES, EMPTY)
        for histogram in model.phases:
            if histogram.phase in phases:
                phases[histogram.phase] = Histogram(LATENCY_BOUNDS_S, tuple(map(float, histogram.counts)))
        arrivals = model.arrivals
        demand = Demand(
            arrivals.requests, arrivals.prompt_tokens, arrivals.uncached_tokens, arrivals.output_tokens
        )
        total += Totals(phases, demand)
    return total


@dataclass(frozen=True, slots=True)
class Increment:
    """What came in [`start_s`, `end_s`)."""

    start_s: float
    end_s: float
    totals: Totals


class CoordinatorTrack:
    """One coordinator over time. Remembers `window_s` and one look more."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._boot = ""
        self._raw = NOTHING
        self._total = NOTHING
        self._looks: deque[tuple[float, Totals]] = deque()
        self.last: scaling_pb2.GetSignalsResponse | None = None
        self.last_s: float | None = None
        """When it last answered."""

    def take(self, response: scaling_pb2.GetSignalsResponse, raw: Totals, now: float) -> Increment | None:
        """Takes an answer, and its counters as `totals_of` gives them; None for the first one, a mere beginning."""
        before_s, restarted = self.last_s, response.coordinator_id != self._boot
        increment: Increment | None = None
        if before_s is not None:
            grown = raw if restarted else raw.since(self._raw)
            # A boot after the last look has counted for less long than that.
            start_s = max(before_s, now - response.uptime_seconds) if restarted else before_s
            increment = Increment(min(start_s, now), now, grown)
            self._total += grown
        self._boot, self._raw = response.coordinator_id, raw
        self.last, self.last_s = response, now
        self._looks.append((now, self._total))
        while len(self._looks) > 1 and self._looks[1][0] <= now - self._window_s:
            self._looks.popleft()
        return increment

    def window(self, now: float) -> Totals | None:
        """What came in the window that ends now; None before the second answer."""
        if len(self._looks) < 2:
            return None
        begin = self._looks[0][1]
        for at_s, totals in self._looks:
            if at_s <= now - self._window_s:
                begin = totals
        return self._total.since(begin)

    def demand_per_s(self, now: float) -> Demand:
        """Mean demand a second over the looks that are remembered."""
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        if last_s <= first_s:
            return Demand()
        return Demand().combined(last.since(first).demand, 1 / (last_s - first_s))
