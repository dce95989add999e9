"""Which requests leave a worker whose machine is taken away, and when. Pure; times in seconds.

What ends in time stays. Of the rest, those that are expected to end too late move at once, the last to end first: they
have to be computed again anyway, and the sooner the less. Those that may end in time, because answers of their kind are
usually shorter than they may be, wait until just enough time is left to move them. So many are under way at a time
that the prompts to be computed again do not pile up on the other workers; once the time is over, all go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CAUTION = 1.25
"""By which predicted times are multiplied: the worker's batch may grow slower than it is, not much faster."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What one attempt still needs of the worker. Infinite where that is not known."""

    attempt_id: str
    expected_s: float
    """By the usual length of answers."""
    most_s: float
    """If the answer becomes as long as it may."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """How moves are paced."""

    at_once: int
    """Most moves under way at a time, of one worker's requests."""
    move_s: float
    """What one takes: from leaving until the next token."""


def moves_now(works: Sequence[RemainingWork], left_s: float, under_way: int, limits: MoveLimits) -> list[str]:
    """The attempts that leave now, in order. `left_s`: until all have to be gone; `under_way`: earlier moves whose
    requests have not gone on yet."""
    if left_s <= 0:
        return [work.attempt_id for work in works]
    may_miss = [work for work in works if work.most_s * CAUTION > left_s]
    may_miss.sort(key=lambda work: (-work.expected_s, -work.most_s, work.attempt_id))
    rounds = math.ceil((len(may_miss) + under_way) / limits.at_once)
    if rounds * limits.move_s < left_s:  # there is time to wait for those that may yet end
        may_miss = [work for work in may_miss if work.expected_s * CAUTION > left_s]
    return [work.attempt_id for work in may_miss[: max(0, limits.at_once - under_way)]]
