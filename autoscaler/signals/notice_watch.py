"""Pauses between other decisions: a spot notice ends them, so that the replacement is ordered at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from autoscaler.signals.early_pause import EarlyPause
from splitserve.client.scaling_client import MAX_DEMAND_S

SHARE = 0.9
"""Of a pause that one call takes at most."""


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

    async def _has_news(self, source: PreemptionSource, wait_s: float) -> bool:
        known = frozenset[str]().union(*self._told.values())
        # Answered before the pause ends: what is known then has no more workers that are gone.
        found = await source.preempted(self._model, known, min(wait_s * SHARE, MAX_DEMAND_S))
        self._told[self._sources.index(source)] = found
        return bool(found - known)
