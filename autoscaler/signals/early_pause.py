"""A pause between two decisions that news from any coordinator ends."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from splitserve.errors import SplitserveError
from splitserve.runtime.first_answer import first_answer

SourceT = TypeVar("SourceT")
AGAIN_S = 0.5
"""Pause after an answer without news, or none, before the next call."""


class EarlyPause(ABC, Generic[SourceT]):
    """Asks all coordinators at once. An empty `model` stands for all models."""

    def __init__(
        self,
        sources: Sequence[SourceT],
        model: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._model, self._clock = tuple(sources), model, clock
        self._woke_s = float("-inf")

    async def pause(self, wait_s: float) -> None:
        """Returns after `wait_s` seconds, or as soon as there is news.

        The latter at most once in `wait_s`, so that a decision which cannot be made or carried out is no busy loop.
        """
        until_s = self._clock() + wait_s
        if self._clock() - self._woke_s > wait_s and await self._asked(wait_s):
            self._woke_s = self._clock()
            return
        await asyncio.sleep(max(0.0, until_s - self._clock()))

    async def _asked(self, wait_s: float) -> bool:
        """Whether any coordinator says so within `wait_s` seconds; one that does not answer does not."""
        return bool(await first_answer((self._ask(source, wait_s) for source in self._sources), wait_s))

    async def _ask(self, source: SourceT, wait_s: float) -> bool:
        """True once there is news of this coordinator; else it asks until it is cancelled."""
        while True:
            # One that does not answer, or is of an earlier version, is logged by the decision after the pause.
            with suppress(SplitserveError):
                if await self._has_news(source, wait_s):
                    return True
            await asyncio.sleep(min(wait_s, AGAIN_S))

    @abstractmethod
    async def _has_news(self, source: SourceT, wait_s: float) -> bool:
        """One call, which waits up to `wait_s` seconds, or MAX_DEMAND_S, for news. Raises SplitserveError."""
