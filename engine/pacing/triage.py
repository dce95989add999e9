"""Triage: who is served first when not all can be in time. As few are late as possible, and the others go by size.

Pure: jobs in, an order out. Each step decides anew, so nobody is given up for good.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    """`order` is that of service: `in_time` by deadline, and `behind` by size where they keep nobody from that."""

    order: tuple[K, ...]
    in_time: tuple[K, ...]
    behind: tuple[K, ...]
    """Those that end late and those without a due time."""
    late: frozenset[K]
    oldest_behind: K | None
    """The first of them to arrive. Gets `OLDEST_SHARE` of the work."""


def triage(jobs: Iterable[Job[K]], ahead_s: float = 0.0, keep_s: float = math.inf) -> Triage[K]:
    """Orders jobs that one worker computes one after the other so that as few as possible end late.

    `ahead_s`: seconds of other work that goes before all of them. Those behind go before one that still has time if
    all from that one on keep `keep_s` seconds to spare: whoever asks for a very late due time gains nothing by it.
    Moore and Hodgson (1968): by deadline; when one ends late, the longest so far goes last. O(n log n).
    """
    jobs = sorted(jobs, key=lambda job: (job.due_s, job.arrival))
    by_deadline = [job for job in jobs if job.due_s < math.inf]
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
    in_time = [job for job in by_deadline if job.arrival not in late]
    behind = sorted(
        (job for job in jobs if job.arrival in late or job.due_s == math.inf),
        key=lambda job: (job.work_s, job.arrival),
    )
    oldest = min(behind, key=lambda job: job.arrival, default=None)
    return Triage(
        tuple(job.key for job in _merged(in_time, behind, ahead_s, keep_s)),
        tuple(job.key for job in in_time),
        tuple(job.key for job in behind),
        frozenset(job.key for job in behind if job.due_s < math.inf),
        None if oldest is None else oldest.key,
    )


def _merged(
    in_time: Sequence[Job[K]], behind: Sequence[Job[K]], ahead_s: float, keep_s: float
) -> Iterator[Job[K]]:
    """Both in their orders; one behind goes first where all the others in time keep `keep_s`."""
    ends_s = accumulate((job.work_s for job in in_time), initial=ahead_s)
    next(ends_s)
    spare_s = [job.due_s - end_s for job, end_s in zip(in_time, ends_s, strict=True)]
    least_s = [*accumulate(reversed(spare_s), min)][::-1]  # of each and all after it
    waiting, delayed_s = deque(behind), 0.0
    for job, left_s in zip(in_time, least_s, strict=True):
        while waiting and delayed_s + waiting[0].work_s + keep_s <= left_s:
            delayed_s += waiting[0].work_s
            yield waiting.popleft()
        yield job
    yield from waiting


class OldestTurn(Generic[K]):
    """Says when it is the turn of the oldest job behind: it is owed `OLDEST_SHARE` of what is computed meanwhile."""

    def __init__(self, most_owed: float = MAX_OWED_TOKENS) -> None:
        """`most_owed`: tokens that it is owed at most, and for which it then waits no longer."""
        self._most_owed = most_owed
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
        wanted = min(max(chunk_tokens, 1), self._most_owed)
        self._owed = min(self._owed, max(wanted, MAX_OWED_TOKENS))
        return self._owed >= wanted

    def computed(self, tokens: Mapping[K, int]) -> None:
        """Chunks of so many tokens of these jobs were computed."""
        if self._oldest is not None:
            owed = OLDEST_SHARE * sum(tokens.values()) - tokens.get(self._oldest, 0)
            self._owed = min(self._owed + owed, self._most_owed)
