"""The lease of the control loops of several models: one for all models, so that one autoscaler acts for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from autoscaler.lease import Lease, LeaseSource


class SharedLease(Lease):
    """As `Lease`, for all models. Each loop renews it: one that is stuck does not lose it for the others."""

    def __init__(
        self, clients: Sequence[LeaseSource], holder: str, valid_s: float, taken: Callable[[], None]
    ) -> None:
        """`taken` is called whenever it was not held before: another may have acted until now."""
        super().__init__(clients, holder, "", valid_s)
        self._taken, self._renewing = taken, asyncio.Lock()

    async def renew(self) -> bool:
        """See Lease."""
        async with self._renewing:
            before = self.held
            now = await super().renew()
            if now and not before:
                self._taken()
            return now
