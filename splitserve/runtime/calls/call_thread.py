"""A thread that makes blocking calls in order, and does not hold up the end of the process.

The threads of `ThreadPoolExecutor` are joined when the interpreter ends, however long their call takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallThread:
    """One daemon thread. A call whose caller has given up still ends before the next one begins."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. Raises RuntimeError once closed."""
        answer: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the thread {self._name} is closed")
            self._calls.append((answer, work))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(answer)

    async def close(self, wait_s: float, last: Callable[[], None] | None = None) -> bool:
        """Cancels what has not begun, and waits `wait_s` seconds for a call under way. Whether the thread has ended;
        one that has not ends with the process, in the middle of its call.

        `last` is what a thread that was used does at its end, however late that is.
        """
        with self._changed:
            self._closed = True
            for answer, _ in self._calls:
                answer.cancel()
            self._calls.clear()
            if last is not None:
                self._calls.append((Future(), last))
            self._changed.notify()
        if self._thread is None:
            return True
        await asyncio.to_thread(self._thread.join, wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                answer, work = self._calls.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)
            del answer, work
