"""Pauses between decisions at zero. The first request that waits for workers ends a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from splitserve.client.scaling_client import MAX_DEMAND_S, ScalingClient
from splitserve.errors import SplitserveError
from splitserve.runtime.waiting import first_answer

AGAIN_S = 0.5
"""Pause before the next call, after an answer without waiting requests and after an error."""


@dataclass(eq=False)
class DemandWatch:
    """Asks all coordinators at once. An empty `model` stands for all models."""

    sources: Sequence[ScalingClient]
    model: str = ""
    clock: Callable[[], float] = time.monotonic
    _woke_s: float = float("-inf")
    """When a pause last ended early, by `clock`."""

    async def pause(self, wait_s: float) -> None:
        """Returns after `wait_s` seconds, or as soon as a request waits for workers.

        It ends early at most once in `wait_s` seconds, so that a decision that keeps failing makes no busy loop.
        """
        until_s = self.clock() + wait_s
        if self.clock() - self._woke_s > wait_s:
            questions = (self._ask(source, wait_s) for source in self.sources)
            if await first_answer(questions, wait_s):
                self._woke_s = self.clock()
                return
        await asyncio.sleep(max(0.0, until_s - self.clock()))

    async def _ask(self, source: ScalingClient, wait_s: float) -> bool:
        """Returns True once a request waits at this coordinator; asks again until then or until it is cancelled."""
        while True:
            # The decision after the pause logs a coordinator that does not answer.
            with suppress(SplitserveError):
                if await source.demand(self.model, min(wait_s, MAX_DEMAND_S)):
                    return True
            await asyncio.sleep(min(wait_s, AGAIN_S))
