"""The thread on which grammars are compiled, so that neither an event loop nor an engine waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from splitserve.grammars import STACK_BYTES

T = TypeVar("T")

_stack_size_lock = threading.Lock()


class GrammarThread:
    """One thread with a deep stack, started at first use: one compilation at a time bounds what clients can cost."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` there after what others wait for; returns its result or raises its exception."""
        return await asyncio.wrap_future(self.started().submit(work))

    def started(self) -> ThreadPoolExecutor:
        """The executor, its thread running."""
        if self._executor is None:
            executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            # A thread takes the size that is set when it starts; setting it is a matter of the whole process.
            with _stack_size_lock:
                before = threading.stack_size(STACK_BYTES)
                try:
                    executor.submit(bool).result()
                finally:
                    threading.stack_size(before)
            self._executor = executor
        return self._executor
