"""What a fetch takes beside waits for steps, by what the same workers and lanes have taken before. Pure.

    fetch = calls + pace * lane

`lane` are the seconds in which the lane carries the bytes by its probe. `calls`, the fixed part, is a weighted median
of what recent fetches took beyond their lanes: younger ones and those of the same pair weigh more. Where there was none
yet, a fetch is what it is made of: a Reserve on the taker and a Prefill on the holder, as requests' own calls took
there beside what they waited and computed, and what requests' handoffs take however small they are.

`pace` is the median of slopes between fetches of different sizes (Theil, 1950; Sen, 1968), so that one that was stopped
half way does not move it. While all were of one size, it is a weighted median of what their own writes took, without
the fixed part, over their lanes: a probe's blocks, and those just computed, lie in the processor's caches, where a
prefix does not (13 against 5.5 GB/s). Part of it, and all before the first fetch, is the median of slopes between
requests' handoffs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp2, isfinite
from statistics import median

from coordinator.workers.snapshot import WorkerKey

Pair = tuple[WorkerKey, WorkerKey]
"""Holder and taker."""
FIRST_CALL_S = 0.003
"""Of a call while no request has made any."""
IDLE_WAIT_S = 0.002
"""In this time an idle engine takes a call up, which is part of the call."""
MAX_CALLS = 9
MAX_WORKERS = 4096
MAX_SAMPLES = 24
"""Of fetches and of handoffs, the latest."""
HALF_LIFE = 4.0
"""So many fetches later one weighs half as much,"""
HALF_LIFE_S = 120.0
"""and so many seconds later: a fetch that seemed too slow for any other to be tried is forgotten."""
KEPT_HALF_LIVES = 4
"""After so many a fetch or a handoff says nothing of the lanes."""
OTHER_PAIR = 0.25
"""Weight of another pair's fetch,"""
UNTRIED = 1.0
"""and of what calls have taken: as much as the first fetch, which may have been slow by chance."""
HANDOFFS = 0.75
"""Weight of requests' handoffs beside the writes of fetches: a lone write that was slow by chance, after which no fetch
may be tried, counts for 50 s."""
LEAST_OWN = 3
"""So many writes of a pair stand for it without those of others."""
OUTLIER = 3.0
"""A fetch, or its write, counts as at most so many times as long as predicted."""
MAX_WRITE_S = 60.0
"""No write takes longer. A worker's word that says so counts for nothing."""
PACES = (0.5, 8.0)
LEAST_SPREAD = 0.2
"""Slopes are taken between two of which the lane carries this share of the larger in more time,"""
LEAST_SPREAD_S = 5e-4
"""and at least so many seconds: below, noise is all that differs."""
LEAST_SLOPES = 3
LEAST_OF_WRITE = 0.5
"""So much of a fetch's write is the lane's at least."""
ONE_PIECE_S = 0.04
"""What the lane carries in this time is written at once (`prefill_worker.prefix_pushes.PIECE_S`)."""


class CallTimes:
    """What calls to workers take beside what they wait for there, in seconds: the quick ones of the last."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerKey, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=4 * MAX_CALLS)

    def record(self, worker: WorkerKey, seconds: float) -> None:
        """Takes a call. Part of it is a worker's word: what is no time counts for nothing."""
        if not isfinite(seconds):
            return
        seconds = max(0.0, seconds)
        if worker not in self._by_worker and len(self._by_worker) >= MAX_WORKERS:
            del self._by_worker[next(iter(self._by_worker))]
        self._by_worker.setdefault(worker, deque(maxlen=MAX_CALLS)).append(seconds)
        self._all.append(seconds)

    def of(self, worker: WorkerKey) -> float | None:
        """Of this worker, else of any; None before the first call."""
        known = self._by_worker.get(worker) or self._all
        return _quick(known) if known else None


@dataclass(frozen=True, slots=True)
class _Sample:
    pair: Pair
    lane_s: float
    took_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class _Lanes:
    """What all samples together say."""

    of_handoffs: float
    """Pace,"""
    handoff_s: float
    """and the fixed part."""
    of_fetches: float | None
    """Pace; None while they are of one size."""


class FetchTimes:
    """Predicts fetches. Times in seconds; `now` on the monotonic clock."""

    def __init__(self) -> None:
        self.reserves, self.prefills = CallTimes(), CallTimes()
        """Calls of requests by the worker called."""
        self._fetches: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._handoffs: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._writes: deque[_Sample] = deque(maxlen=MAX_CALLS)
        self._lanes: _Lanes | None = None
        """None: to be counted again."""

    def record(self, pair: Pair, lane_s: float, took_s: float, now: float) -> None:
        """Takes a fetch that took `took_s` beside the predicted waits for steps."""
        took_s = min(max(took_s, 0.0), OUTLIER * self.predicted_s(pair, lane_s, now))
        self._fetches.append(_Sample(pair, lane_s, took_s, now))
        self._lanes = None

    def record_handoff(self, pair: Pair, lane_s: float, took_s: float, now: float) -> None:
        """Takes a request's handoff, of a prompt that was written at once: from its end on the engine until the last
        byte was acknowledged."""
        if 0 <= took_s <= MAX_WRITE_S:  # a worker's word
            self._handoffs.append(_Sample(pair, lane_s, took_s, now))
            self._lanes = None

    def record_write(self, pair: Pair, lane_s: float, took_s: float, now: float) -> None:
        """The same of a fetch, whose blocks have lain in memory. What is written in pieces says nothing."""
        if 0 < lane_s <= ONE_PIECE_S and 0 <= took_s <= MAX_WRITE_S:
            most_s = self._measured(now).handoff_s + OUTLIER * self.pace(pair, now) * lane_s
            took_s = min(took_s, most_s)
            self._writes.append(_Sample(pair, lane_s, took_s, now))
            self._lanes = None

    def predicted_s(self, pair: Pair, lane_s: float, now: float) -> float:
        """Of a fetch whose bytes the lane alone carries in `lane_s`."""
        pace = self.pace(pair, now)
        return self._calls_s(pair, pace, now) + pace * lane_s

    def calls_s(self, pair: Pair, now: float) -> float:
        """The fixed part."""
        return self._calls_s(pair, self.pace(pair, now), now)

    def _calls_s(self, pair: Pair, pace: float, now: float) -> float:
        weighed = [(self._untried_s(pair) + self._measured(now).handoff_s, UNTRIED)]
        for age, sample in enumerate(reversed(self._fetches)):
            weight = 2.0 ** (-age / HALF_LIFE) * _freshness(sample, now)
            rest_s = max(0.0, sample.took_s - pace * sample.lane_s)
            weighed.append((rest_s, weight * (1.0 if sample.pair == pair else OTHER_PAIR)))
        return weighted_median(weighed)

    def pace(self, pair: Pair, now: float) -> float:
        """Seconds for each second that the lane alone takes."""
        lanes = self._measured(now)
        if lanes.of_fetches is not None:
            return lanes.of_fetches
        own = [sample for sample in self._writes if sample.pair == pair]
        weighed = [(lanes.of_handoffs, HANDOFFS)]
        for sample in own if len(own) >= LEAST_OWN else self._writes:
            of_lane_s = max(sample.took_s - lanes.handoff_s, LEAST_OF_WRITE * sample.took_s)
            weighed.append((of_lane_s / sample.lane_s, _freshness(sample, now)))
        return _within(PACES, weighted_median(weighed))

    def _measured(self, now: float) -> _Lanes:
        for samples in (self._fetches, self._handoffs, self._writes):
            while samples and samples[0].at_s < now - KEPT_HALF_LIVES * HALF_LIFE_S:
                samples.popleft()
                self._lanes = None
        if self._lanes is None:
            of_handoffs = _within(PACES, self._handoffs_pace())
            beyond = [max(0.0, s.took_s - of_handoffs * s.lane_s) for s in self._handoffs]
            slopes = _slopes(self._fetches)
            of_fetches = _within(PACES, median(slopes)) if len(slopes) >= LEAST_SLOPES else None
            self._lanes = _Lanes(of_handoffs, _quick(beyond) if beyond else 0.0, of_fetches)
        return self._lanes

    def _handoffs_pace(self) -> float:
        if len(slopes := _slopes(self._handoffs)) >= LEAST_SLOPES:
            return median(slopes)
        long = [s.took_s / s.lane_s for s in self._handoffs if s.lane_s >= 4 * LEAST_SPREAD_S]
        return median(long) if len(long) >= LEAST_SLOPES else 1.0

    def _untried_s(self, pair: Pair) -> float:
        holder, taker = pair
        prefill_s, reserve_s = self.prefills.of(holder), self.reserves.of(taker)
        known = [each for each in (prefill_s, reserve_s) if each is not None]
        other_s = known[0] if known else FIRST_CALL_S
        return sum(other_s if each is None else each for each in (prefill_s, reserve_s))


def beyond_idle_s(told_s: float) -> float:
    """Of what a worker says that a call has waited there: what an idle one would not have let it wait."""
    return max(0.0, told_s - IDLE_WAIT_S)


def weighted_median(weighed: Iterable[tuple[float, float]]) -> float:
    """The value in the middle of (value, weight); the mean of two where the middle is between them."""
    values = sorted(weighed)
    half, below = sum(weight for _, weight in values) / 2, 0.0
    for index, (value, weight) in enumerate(values):
        below += weight
        if below > half:
            return value
        if below == half and index + 1 < len(values):
            return (value + values[index + 1][0]) / 2
    return values[-1][0]


def _quick(seconds: Iterable[float]) -> float:
    """The lower quartile. What calls and handoffs wait for comes on top, which is most of it while a cluster starts."""
    known = sorted(seconds)
    return known[len(known) // 4]


def _freshness(sample: _Sample, now: float) -> float:
    """A weight; of a sample that is new, 1."""
    return exp2(-max(0.0, now - sample.at_s) / HALF_LIFE_S)


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _slopes(samples: Sequence[_Sample] | deque[_Sample]) -> list[float]:
    return [
        (b.took_s - a.took_s) / (b.lane_s - a.lane_s)
        for a, b in combinations(samples, 2)
        if abs(b.lane_s - a.lane_s) >= max(LEAST_SPREAD_S, LEAST_SPREAD * max(a.lane_s, b.lane_s))
    ]
