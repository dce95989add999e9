"""Triage: who is served first when not all can be in time. As few are late as possible, and the late ones go by size.

Pure: jobs in, an order out. Each step decides anew, so nobody is given up for good.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

OLDEST_SHARE = 0.1
"""Share of the work that the oldest job behind the others gets, however long it is."""
MAX_OWED_TOKENS = 512
"""It is owed this much at most, so that one that could not start for long does not keep all others waiting then."""


@dataclass(frozen=True, slots=True)
class Job(Generic[K]):
    """A prompt that waits. `work_s`: seconds that it still takes; `due_s`: when it has to be done, in seconds from now,
    infinity if there is no such time; `arrival`: its number in the order of arrival."""

    key: K
    work_s: float
    due_s: float
    arrival: int


@dataclass(frozen=True, slots=True)
class Triage(Generic[K]):
    """`in_time` by deadline, then `late` by size: the order of service."""

    in_time: tuple[K, ...]
    late: tuple[K, ...]
    oldest_behind: K | None
    """The first to arrive of those that are late or have no due time. Gets `OLDEST_SHARE` of the work."""


def triage(jobs: Iterable[Job[K]], ahead_s: float = 0.0) -> Triage[K]:
    """Splits jobs that one worker computes one after the other so that as few as possible end late.

    `ahead_s`: seconds of other work that goes before all of them. Moore and Hodgson (1968): by deadline; when one ends
    late, the longest so far goes last. O(n log n).
    """
    by_deadline = sorted(jobs, key=lambda job: (job.due_s, job.arrival))
    longest: list[tuple[float, int, Job[K]]] = []
    late: set[int] = set()
    ends_s = ahead_s
    for job in by_deadline:
        heapq.heappush(longest, (-job.work_s, -job.arrival, job))
        ends_s += job.work_s
        if ends_s > job.due_s:
            _, _, given_up = heapq.heappop(longest)
            late.add(given_up.arrival)
            ends_s -= given_up.work_s
    by_size = sorted(
        (job for job in by_deadline if job.arrival in late), key=lambda job: (job.work_s, job.arrival)
    )
    behind = (job for job in by_deadline if job.arrival in late or job.due_s == math.inf)
    oldest = min(behind, key=lambda job: job.arrival, default=None)
    return Triage(
        tuple(job.key for job in by_deadline if job.arrival not in late),
        tuple(job.key for job in by_size),
        None if oldest is None else oldest.key,
    )


class OldestTurn(Generic[K]):
    """Says when it is the turn of the oldest job behind: it is owed `OLDEST_SHARE` of what is computed meanwhile."""

    def __init__(self) -> None:
        self._oldest: K | None = None
        self._owed = 0.0

    def of(self, oldest: K | None, chunk_tokens: int = 0) -> bool:
        """Whether this job, which is the oldest now, is owed its next chunk, of `chunk_tokens`.

        What another one had beyond its share is forgotten; what it was owed is owed to this one, unless there is none.
        """
        if oldest is None:
            self._owed = 0.0
        elif oldest != self._oldest:
            self._owed = max(self._owed, 0.0)
        self._oldest = oldest
        return self._owed >= min(max(chunk_tokens, 1), MAX_OWED_TOKENS)

    def computed(self, tokens: Mapping[K, int]) -> None:
        """Chunks of so many tokens of these jobs were computed."""
        if self._oldest is not None:
            owed = OLDEST_SHARE * sum(tokens.values()) - tokens.get(self._oldest, 0)
            self._owed = min(self._owed + owed, MAX_OWED_TOKENS)
