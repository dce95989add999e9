"""Demand over time, in buckets between looks. Pure; bounded by age."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from autoscaler.signals.totals import DemandCounts
from autoscaler.snapshot import ArrivalBucket


@dataclass(slots=True)
class _Bucket:
    start_s: float
    end_s: float
    demand: DemandCounts


class ArrivalLog:
    """Arrivals of the last `history_s` seconds, in contiguous buckets that end at each observation."""

    def __init__(self, history_s: float) -> None:
        self.history_s = history_s
        self._buckets: deque[_Bucket] = deque()
        self._last_s: float | None = None

    def look(self, now: float) -> None:
        """Ends a bucket at `now`. The first call only starts the first bucket."""
        if self._last_s is not None and now > self._last_s:
            self._buckets.append(_Bucket(self._last_s, now, DemandCounts()))
        self._last_s = now
        while self._buckets and self._buckets[0].end_s <= now - self.history_s:
            self._buckets.popleft()

    def add(self, start_s: float, end_s: float, demand: DemandCounts) -> None:
        """Spreads demand evenly over the buckets in [`start_s`, `end_s`); the part before the first bucket is
        dropped."""
        length_s = end_s - start_s
        if length_s <= 0:
            if self._buckets:
                self._buckets[-1].demand += demand
            return
        for bucket in reversed(self._buckets):
            if bucket.end_s <= start_s:
                break
            overlap_s = min(bucket.end_s, end_s) - max(bucket.start_s, start_s)
            if overlap_s > 0:
                bucket.demand = bucket.demand.combined(demand, overlap_s / length_s)

    def buckets(self, held: list[tuple[float, DemandCounts]]) -> tuple[ArrivalBucket, ...]:
        """All buckets, oldest first. `held`: for each coordinator the time of its last answer and its mean demand per
        second, which fills the time since."""
        demands = {bucket.end_s: bucket.demand for bucket in self._buckets}
        for since_s, per_s in held:
            for bucket in self._buckets:
                seconds = bucket.end_s - max(bucket.start_s, since_s)
                if seconds > 0:
                    demands[bucket.end_s] = demands[bucket.end_s].combined(per_s, seconds)
        buckets: deque[ArrivalBucket] = deque()
        # Requests whose prompt a decode worker computes are counted after their arrival. Those that do not fit into
        # the newest buckets arrived before.
        later_requests = later_tokens = 0.0
        for bucket in reversed(self._buckets):
            demand = demands[bucket.end_s]
            later_requests += demand.local_requests
            later_tokens += demand.local_tokens
            local_requests = min(demand.requests, later_requests)
            local_tokens = min(demand.uncached_tokens, later_tokens)
            later_requests -= local_requests
            later_tokens -= local_tokens
            buckets.appendleft(
                ArrivalBucket(
                    start_s=bucket.start_s,
                    length_s=bucket.end_s - bucket.start_s,
                    requests=round(demand.requests),
                    prompt_tokens=round(demand.prompt_tokens),
                    uncached_tokens=round(demand.uncached_tokens - local_tokens),
                    output_tokens=demand.output_tokens,
                    local_requests=round(local_requests),
                )
            )
        return tuple(buckets)
