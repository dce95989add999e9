"""Tasks that may outlive the request that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from splitserve.logs import log_exception
from splitserve.runtime.cancellation import end_tasks


class BackgroundTasks:
    """Owns short clean-up tasks, so that cancelling a request does not cancel its clean-up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Number of running tasks."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task. An exception in it is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, grace_s: float) -> None:
        """Waits up to `grace_s` for the tasks, then cancels the rest, and leaves those that do not end for that."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await end_tasks(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_exception("background.failed", error)
