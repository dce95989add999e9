"""State with a version that others wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Versioned:
    """Its `version` grows with every change that is announced. Lives on one event loop."""

    def __init__(self) -> None:
        self.version = 0
        self._changed = asyncio.Event()

    async def wait_change(self, version: int) -> int:
        """Waits until `version` differs from the given one; returns the new one."""
        while self.version == version:
            await self._changed.wait()
        return self.version

    async def wait_until(self, condition: Callable[[], T], wait_s: float) -> T:
        """The first truthy result of `condition`, evaluated at each change of `version`, or its last result after
        `wait_s` seconds."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while True:
            version, found = self.version, condition()
            left_s = deadline_s - loop.time()
            if found or left_s <= 0:
                return found
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.wait_change(version)

    def announce(self) -> None:
        """Wakes all who wait. The version has grown before."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
