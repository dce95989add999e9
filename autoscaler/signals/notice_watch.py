"""Pauses between other decisions: a spot notice ends them, so that the replacement is ordered at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from autoscaler.signals.early_pause import EarlyPause
from splitserve.client.scaling_client import MAX_DEMAND_S
from splitserve.errors import SplitserveError


class PreemptionSource(Protocol):
    """One coordinator; `splitserve.client.scaling_client.ScalingClient` is one."""

    async def preempted(self, model: str, known: Iterable[str], wait_s: float) -> frozenset[str]:
        """The workers with a notice: once one is not `known`, or after `wait_s` seconds. Raises SplitserveError."""


class NoticeWatch(EarlyPause[PreemptionSource]):
    """Ends a pause when a worker has a notice that no coordinator has told of before."""

    def __init__(self, sources: Sequence[PreemptionSource], model: str = "") -> None:
        super().__init__(sources, model)
        self._told: dict[int, frozenset[str]] = {}
        """What each coordinator said last, by its place."""

    async def _ask(self, source: PreemptionSource, wait_s: float) -> bool:
        known = frozenset[str]().union(*self._told.values())
        try:
            found = await source.preempted(self._model, known, min(wait_s, MAX_DEMAND_S))
        except SplitserveError:
            # It is away, or an earlier version. The decision after the pause says the former.
            found = frozenset()
        else:
            self._told[self._sources.index(source)] = found
        if found - known:
            return True
        await asyncio.Event().wait()  # the pause ends it
        return False
