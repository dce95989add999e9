"""Demand over time, in buckets between looks. Pure; bounded by age."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
        """Spreads demand evenly over the buckets in [`start_s`, `end_s`); what precedes the first one is dropped."""
        for bucket, share in self._shares(start_s, end_s):
            bucket.demand = bucket.demand.combined(demand, share)

    def rows(self) -> list[tuple[float, float, DemandCounts]]:
        """Start, end and demand of each bucket, oldest first, without what silent coordinators may have got."""
        return [(bucket.start_s, bucket.end_s, bucket.demand) for bucket in self._buckets]

    def restore(self, rows: Sequence[tuple[float, float, DemandCounts]]) -> None:
        """Begins with these buckets, in order of time. Call before the first `look`; nothing is known of the time from
        the last of them to that."""
        self._buckets = deque(_Bucket(*row) for row in rows)

    def buckets(self, held: list[tuple[float, DemandCounts]]) -> tuple[ArrivalBucket, ...]:
        """All buckets, oldest first. `held`: (last answer, mean demand per second) of each coordinator."""
        demands = {bucket.end_s: bucket.demand for bucket in self._buckets}
        for since_s, per_s in held:
            for bucket in self._buckets:
                seconds = bucket.end_s - max(bucket.start_s, since_s)
                if seconds > 0:
                    demands[bucket.end_s] = demands[bucket.end_s].combined(per_s, seconds)
        return tuple(_rounded(bucket, demands[bucket.end_s]) for bucket in self._buckets)

    def _shares(self, start_s: float, end_s: float) -> list[tuple[_Bucket, float]]:
        length_s = end_s - start_s
        if length_s <= 0:
            return [(self._buckets[-1], 1.0)] if self._buckets else []
        shares = []
        for bucket in reversed(self._buckets):
            if bucket.end_s <= start_s:
                break
            overlap_s = min(bucket.end_s, end_s) - max(bucket.start_s, start_s)
            if overlap_s > 0:
                shares.append((bucket, overlap_s / length_s))
        return shares


def _rounded(bucket: _Bucket, demand: DemandCounts) -> ArrivalBucket:
    return ArrivalBucket(
        start_s=bucket.start_s,
        length_s=bucket.end_s - bucket.start_s,
        requests=round(demand.requests),
        prompt_tokens=round(demand.prompt_tokens),
        uncached_tokens=round(demand.uncached_tokens),
        output_tokens=demand.output_tokens,
    )
