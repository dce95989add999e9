"""The lease: of several autoscalers one acts. The others observe, and one takes over when the lease ends.

A majority of the coordinators grants the lease. With an even number of them the first address in alphabetical order has
two votes, so all autoscalers must get the same addresses. A lease runs from the moment before the request for it, by
the monotonic clock, which goes on while a process is stopped: a process that wakes up late sees that its lease is over.
Each coordinator gives a fencing number of its own, and accepts no plan without it while the lease is in force.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from splitserve.client.scaling_client import ScalingClient
from splitserve.errors import SplitserveError
from splitserve.logs import log_event
from splitserve.v1 import scaling_pb2


class Lease:
    """One autoscaler's claim to scale `model` (empty: all). Clients are not closed here."""

    def __init__(
        self,
        clients: Sequence[ScalingClient],
        holder: str,
        model: str,
        valid_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = sorted(clients, key=lambda client: client.target)
        self.holder, self._model, self._valid_s, self._clock = holder, model, valid_s, clock
        self._numbers: dict[str, int] = {}
        self._until_s = 0.0
        self._was_held: bool | None = None
        self.other = ""
        """The holder, if it is known to be another autoscaler; else empty."""

    @property
    def held(self) -> bool:
        """Whether this autoscaler may act now."""
        return self._clock() < self._until_s

    def number_at(self, target: str) -> int:
        """The fencing number that this coordinator gave; 0: none."""
        return self._numbers.get(target, 0)

    def lose(self) -> None:
        """Ends the lease here, because a coordinator says that it is over."""
        self._until_s = 0.0

    async def renew(self) -> bool:
        """Takes or extends the lease. Returns whether it is held. Errors of coordinators count as refusals."""
        asked_s, held = self._clock(), self.held
        answers = await asyncio.gather(*(self._ask(client, self._valid_s, held) for client in self._clients))
        granted = [answer is not None and answer.granted for answer in answers]
        for client, answer in zip(self._clients, answers, strict=True):
            if answer is not None:  # without an answer the earlier number may still be valid
                self._numbers[client.target] = answer.number if answer.granted else 0
        holders = [answer.holder for answer in answers if answer is not None]
        others = [holder for holder in holders if holder not in ("", self.holder)]
        self.other = others[0] if others else ""
        if self._is_majority(granted):
            self._until_s = asked_s + self._valid_s
        elif others or not held:
            self._until_s = 0.0
            if any(granted):
                await self.release()
        if self.held != self._was_held:
            self._was_held = self.held
            event = "lease.acquired" if self.held else "lease.observing"
            log_event(event, level=logging.INFO, holder=self.holder, held_by=self.other)
        return self.held

    async def release(self) -> None:
        """Gives the lease up, so that another autoscaler need not wait for its end."""
        self._until_s, self._numbers = 0.0, {}
        await asyncio.gather(*(self._ask(client, 0.0, False) for client in self._clients))

    def _is_majority(self, granted: Sequence[bool]) -> bool:
        votes = [1] * len(granted)
        if len(votes) % 2 == 0:
            votes[0] = 2
        return 2 * sum(vote for vote, yes in zip(votes, granted, strict=True) if yes) > sum(votes)

    async def _ask(
        self, client: ScalingClient, valid_s: float, held: bool
    ) -> scaling_pb2.AcquireLeaseResponse | None:
        number = self.number_at(client.target) if held else 0
        try:
            return await client.acquire_lease(self.holder, valid_s=valid_s, model=self._model, number=number)
        except SplitserveError as error:
            log_event(
                "lease.missing",
                level=logging.WARNING,
                coordinator=client.target,
                reason=error.reason,
                error=error.message,
            )
            return None
