"""What lets a test follow and hold scripted parts without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from tests.support.waiting import PATIENCE_S

T = TypeVar("T")


class Journal(Generic[T]):
    """What happened, in order; tests wait on it instead of sleeping."""

    def __init__(self) -> None:
        self.entries: list[T] = []
        self._changed = asyncio.Event()

    def add(self, entry: T) -> None:
        self.entries.append(entry)
        self._changed.set()

    async def wait(self, count: int = 1) -> T:
        """The count-th entry, as soon as there is one."""
        while len(self.entries) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
        return self.entries[count - 1]


class Gate:
    """Open unless a test closes it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0
        """How many stand before it."""

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


async def settled(predicate: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Waits until the predicate holds; for state that has no event of its own."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not predicate():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert predicate()
