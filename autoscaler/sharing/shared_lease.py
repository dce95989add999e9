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
        self._begun, self._succeeded = 0, False

    async def renew(self) -> bool:
        """See Lease. One that began after this call, and succeeded, serves for it too."""
        begun = self._begun
        async with self._renewing:
            if self._begun > begun and self._succeeded and self.held:
                return True
            before, until_s = self.held, self._until_s
            self._begun, self._succeeded = self._begun + 1, False
            now = await super().renew()
            self._succeeded = self._until_s > until_s
            if now and not before:
                self._taken()
            return now
