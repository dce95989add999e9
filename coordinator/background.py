"""Tasks that may outlive the request that started them, with one owner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from splitserve.logs import log_exception


class Background:
    """Owns short clean-up tasks, so that a client's cancellation does not lose them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Tasks that still run."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task. An error in it is logged, nobody else sees it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, grace_s: float) -> None:
        """Waits for the tasks, then cancels what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_exception("background.failed", error)
