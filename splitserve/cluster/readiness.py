"""When a starting cluster is asked whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from splitserve.errors import DeadlineExceededError, UnavailableError

READY_POLL_S = 0.1
SAID_READY_POLL_S = 0.02
"""The same once every process says that it is ready, for QUICK_LOOKS: they connect in some milliseconds."""
QUICK_LOOKS = 50

Probe = Callable[[], Awaitable[str | None]]
"""Returns the served model's name once the whole cluster is ready, else None. UnavailableError means not yet."""


class Readiness:
    """Asks a cluster at once when all of its first processes have said that they are ready, and in intervals."""

    def __init__(self, names: Iterable[str], probe: Probe) -> None:
        self._silent, self._probe = set(names), probe
        self._all_said = asyncio.Event()

    def said_ready(self, name: str) -> None:
        """A process says that it is ready. Others than the first ones are nobody here."""
        self._silent.discard(name)
        if not self._silent:
            self._all_said.set()

    async def wait(self) -> str:
        """Returns what the probe does, once that is a name."""
        quick = QUICK_LOOKS
        while True:
            with suppress(UnavailableError, DeadlineExceededError):
                model = await self._probe()
                if model is not None:
                    return model
            if self._all_said.is_set():
                await asyncio.sleep(SAID_READY_POLL_S if quick > 0 else READY_POLL_S)
                quick -= 1
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_said.wait(), READY_POLL_S)
