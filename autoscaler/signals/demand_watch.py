"""Pauses between decisions at zero: the first request that waits for workers ends them."""

from __future__ import annotations

from typing import Protocol

from autoscaler.signals.early_pause import EarlyPause
from splitserve.client.scaling_client import MAX_DEMAND_S


class DemandSource(Protocol):
    """One coordinator; `splitserve.client.scaling_client.ScalingClient` is one."""

    async def demand(self, model: str, wait_s: float) -> bool:
        """Whether a request waits for workers: once one does, or after `wait_s` seconds. Raises SplitserveError."""


class DemandWatch(EarlyPause[DemandSource]):
    """Ends a pause when a request waits for workers."""

    async def _has_news(self, source: DemandSource, wait_s: float) -> bool:
        return await source.demand(self._model, min(wait_s, MAX_DEMAND_S))
