"""Tells all coordinators which workers rest and whether decode is lent to prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from splitserve.errors import SplitserveError, UnavailableError
from splitserve.scaling_client import ScalingClient


class CoordinatorRotation:
    """A `Rotation` over one client a coordinator, which stay their owner's. Each is told, whatever the others say.

    A plan ends by itself after `valid_s` seconds: where the autoscaler dies, its standbys serve again.
    """

    def __init__(self, clients: Sequence[ScalingClient], valid_s: float) -> None:
        self._clients = tuple(clients)
        self._valid_s = valid_s

    async def apply(self, standby: Sequence[str], active: Sequence[str], lend: bool) -> None:
        """See `Rotation`. Raises UnavailableError naming the coordinators that could not be told."""
        calls = [self._tell(client, standby, active, lend) for client in self._clients]
        failed = [said for said in await asyncio.gather(*calls) if said]
        if failed:
            raise UnavailableError("; ".join(failed), reason="PLAN_NOT_APPLIED")

    async def _tell(
        self, client: ScalingClient, standby: Sequence[str], active: Sequence[str], lend: bool
    ) -> str:
        try:
            await client.apply_plan(standby=standby, active=active, lend=lend, valid_s=self._valid_s)
        except SplitserveError as error:
            return f"{client.target}: {error}"
        return ""
