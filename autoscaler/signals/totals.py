"""Running totals of one coordinator's counters, and their increase over a window. Pure; time is an argument.

A coordinator's counters start at zero when it starts. The increments between observations are summed, so totals do not
decrease when a coordinator restarts, which its new id shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from splitserve.histograms import LATENCY_BOUNDS_S, Histogram
from splitserve.v1 import scaling_pb2

READ_PHASES: tuple[int, ...] = (
    scaling_pb2.PHASE_PREFILL,
    scaling_pb2.PHASE_TTFT,
    scaling_pb2.PHASE_TTFT_LONG,
    scaling_pb2.PHASE_TPOT,
)
EMPTY = Histogram(LATENCY_BOUNDS_S, (0.0,) * (len(LATENCY_BOUNDS_S) + 1))


@dataclass(frozen=True, slots=True)
class DemandCounts:
    """Arrived requests and tokens. `local_*`: the part of `requests` and of `uncached_tokens` whose prompts decode
    workers compute; counted after the arrival."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    local_requests: float = 0.0
    local_tokens: float = 0.0

    def __add__(self, other: DemandCounts) -> DemandCounts:
        return self.combined(other, 1.0)

    def combined(self, other: DemandCounts, share: float) -> DemandCounts:
        """This plus `share` times the other."""
        return DemandCounts(
            self.requests + other.requests * share,
            self.prompt_tokens + other.prompt_tokens * share,
            self.uncached_tokens + other.uncached_tokens * share,
            self.output_tokens + other.output_tokens * share,
            self.local_requests + other.local_requests * share,
            self.local_tokens + other.local_tokens * share,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment: durations by phase, and demand."""

    phases: Mapping[int, Histogram]
    demand: DemandCounts

    def __add__(self, other: Totals) -> Totals:
        phases = {phase: self.phases[phase] + other.phases[phase] for phase in READ_PHASES}
        return Totals(phases, self.demand + other.demand)

    def since(self, earlier: Totals) -> Totals:
        """The increase since `earlier`, by the same coordinator process."""
        phases = {phase: self.phases[phase] - earlier.phases[phase] for phase in READ_PHASES}
        return Totals(phases, self.demand.combined(earlier.demand, -1.0))


NOTHING = Totals(dict.fromkeys(READ_PHASES, EMPTY), DemandCounts())


def totals_of(models: Iterable[scaling_pb2.ModelSignals]) -> Totals:
    """The counters of these models together."""
    total = NOTHING
    for model in models:
        phases = dict.fromkeys(READ_PHASES, EMPTY)
        for histogram in model.phases:
            if histogram.phase in phases:
                phases[histogram.phase] = Histogram(LATENCY_BOUNDS_S, tuple(map(float, histogram.counts)))
        arrivals = model.arrivals
        demand = DemandCounts(
            arrivals.requests,
            arrivals.prompt_tokens,
            arrivals.uncached_tokens,
            arrivals.output_tokens,
            arrivals.local_requests,
            arrivals.local_tokens,
        )
        total += Totals(phases, demand)
    return total


class CoordinatorTrack:
    """One coordinator over time. Keeps the observations of the last `window_s` seconds and the one before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._boot = ""
        self._raw = NOTHING
        self._total = NOTHING
        self._observations: deque[tuple[float, Totals]] = deque()
        self.last: scaling_pb2.GetSignalsResponse | None = None
        self.last_s: float | None = None
        """When the coordinator last answered."""

    def take(
        self, response: scaling_pb2.GetSignalsResponse, raw: Totals, now: float
    ) -> tuple[float, DemandCounts] | None:
        """Records an answer with its counters (`totals_of`). Returns the time of the answer before and the demand
        since; None for the first answer."""
        before_s, restarted = self.last_s, response.coordinator_id != self._boot
        arrived: tuple[float, DemandCounts] | None = None
        if before_s is not None:
            grown = raw if restarted else raw.since(self._raw)
            # After a restart the counters cover the uptime only.
            start_s = max(before_s, now - response.uptime_seconds) if restarted else before_s
            arrived = min(start_s, now), grown.demand
            self._total += grown
        self._boot, self._raw = response.coordinator_id, raw
        self.last, self.last_s = response, now
        self._observations.append((now, self._total))
        while len(self._observations) > 1 and self._observations[1][0] <= now - self._window_s:
            self._observations.popleft()
        return arrived

    def window(self, now: float) -> Totals | None:
        """The increase over the window that ends now; None before the second answer."""
        if len(self._observations) < 2:
            return None
        begin = self._observations[0][1]
        for at_s, totals in self._observations:
            if at_s <= now - self._window_s:
                begin = totals
        return self._total.since(begin)

    def demand_per_s(self) -> DemandCounts:
        """Mean demand per second over the kept observations."""
        (first_s, first), (last_s, last) = self._observations[0], self._observations[-1]
        if last_s <= first_s:
            return DemandCounts()
        return DemandCounts().combined(last.since(first).demand, 1 / (last_s - first_s))
