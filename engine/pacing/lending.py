"""Rests between steps: a worker whose streams are ahead of their targets lets a neighbour compute on its cores.

It rests only while a neighbour wants that, and only until the first stream is due. Time is an argument everywhere, in
seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from engine.pacing.token_clock import StreamPace, TokenClock

MIN_LENT_TOKENS = 64
"""For a shorter chunk nobody is asked to rest: it is over soon. It uses cores that rest anyway."""
MAX_REST_S = 0.25
"""Streams stand still for no longer than this at a time, whatever they are ahead of their targets."""
MIN_REST_S = 0.03
"""A shorter rest is not worth its price: the borrower comes and goes between two operations of some milliseconds."""
STEP_TIMES = 1.5
"""The step that follows counts as so many times what it is predicted to take."""
RETURN_S = 0.003
"""What passes besides until the cores are back: a wake-up, and the borrower's present operation."""
LOOK_S = 0.005
"""Time between two looks at whether the neighbour still wants the cores."""
UNUSED_S = 0.05
"""A neighbour that has computed nothing on the cores for so long is frozen, or does something else."""
AGAIN_S = 1.0
"""After that no neighbour's wish counts for so long."""


def asks_for_rests(tokens: int, *, decode_only: bool) -> bool:
    """Whether neighbours are asked to rest for a step of so many tokens; others use cores that rest anyway."""
    return not decode_only and tokens >= MIN_LENT_TOKENS


def spare_until_s(now: float, streams: Collection[StreamPace], clock: TokenClock, step_s: float) -> float:
    """Until when a step that takes `step_s`, with a token for each of these streams, may wait; `now` if it may not."""
    if any(stream.tpot_s <= STEP_TIMES * step_s for stream in streams):
        return now
    due_s = min((clock.due_s(stream) for stream in streams), default=now)
    return max(now, due_s - STEP_TIMES * step_s - RETURN_S)


class StepLending:
    """Decides when a worker with streams begins and ends a rest."""

    def __init__(self, demand: Callable[[], int | None], spare_until_s: Callable[[float], float]) -> None:
        """`demand` is `ModelRunner.demand`: None unless a neighbour would compute on the cores, then a number that
        changes while it does. `spare_until_s` says at a time until when the next step may wait, see the function."""
        self._demand, self._spare_until_s = demand, spare_until_s
        self._until_s = -math.inf
        """End of the present rest at the latest."""
        self._not_before_s = -math.inf
        self._used: int | None = None
        self._used_s = self._looked_s = -math.inf
        """When the neighbour was last seen to use the cores, or the rest began; and when that was last looked at."""

    @property
    def next_look_s(self) -> float:
        """When to ask `rests` again, during a rest; else infinity."""
        return min(self._until_s, self._looked_s + LOOK_S) if self._until_s > -math.inf else math.inf

    def begin(self, now: float) -> bool:
        """Begins a rest after a step, if that is of use to a neighbour; returns whether."""
        used = self._demand()
        if used is None or now < self._not_before_s:
            return False
        spare_until_s = self._spare_until_s(now)
        if spare_until_s - now < MIN_REST_S:
            return False
        self._until_s = min(spare_until_s, now + MAX_REST_S)
        self._used, self._used_s, self._looked_s = used, now, now
        return True

    def rests(self, now: float) -> bool:
        """Whether there is a rest that goes on. It ends early where there is a prompt or another stream now."""
        if self._until_s == -math.inf:
            return False
        self._looked_s = now
        used = self._demand()
        if used != self._used:
            self._used, self._used_s = used, now
        unused = now - self._used_s >= UNUSED_S
        if unused:
            self._not_before_s = now + AGAIN_S
        self._until_s = min(self._until_s, self._spare_until_s(now))
        if used is None or unused or now >= self._until_s:
            self.end()
            return False
        return True

    def end(self) -> None:
        """The rest is over, if there is one."""
        self._until_s = -math.inf
