"""Work on threads beside the event loop: blocking calls in order (`CallThread`), parsing (`ParserThread`), and calls
that are shared by all who want the same result at the same time (`SharedCalls`).

The threads of `ThreadPoolExecutor` are joined when the interpreter ends, however long their call takes; `CallThread`
does not hold up the end of the process. Python code on another thread lets the event loop run again after the
interpreter's switch interval. A call into C that keeps the interpreter's lock does not: the work of such a call must be
bounded before it begins.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")


class CallThread:
    """One daemon thread that makes calls in order. A call whose caller has given up still runs to its end."""

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
        """Cancels calls that have not begun, and waits `wait_s` seconds for the one under way. Returns whether the
        thread has ended; otherwise it ends with the process, in the middle of its call.

        `last` is called on the thread at its end, however late, if the thread was ever used.
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


P = ParamSpec("P")

SHORT_BYTES = 16 * 2**10
"""Messages up to this size are parsed on the event loop: in 3 ms at worst, and usually faster than another thread could
be woken."""
SWITCH_INTERVAL_S = 0.001


class ParserThread:
    """One thread, started at first use, that does its work in order. Each further thread that wants the interpreter
    could delay the event loop by another switch interval."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parser")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` on data of `size` bytes. Short data is worked on here, on the event loop."""
        if size <= SHORT_BYTES:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Drops work that has not begun and lets the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def favor_event_loop() -> None:
    """Lets the event loop have the interpreter back within a millisecond while other threads compute."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


@dataclass(slots=True)
class _Call(Generic[T]):
    future: asyncio.Future[T]
    waiters: int = 0


class SharedCalls(Generic[T]):
    """Calls in progress, by key. A call that nobody waits for any more is cancelled. For one event loop."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def result(self, key: Hashable, begin: Callable[[], Awaitable[T]]) -> T:
        """The result, or the error, of the call with this key; `begin` begins the call unless it is in progress."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.ensure_future(begin()))
        call.waiters += 1
        try:
            return await asyncio.shield(call.future)
        finally:
            call.waiters -= 1
            if not call.waiters or call.future.done():
                self._forget(key, call)

    def _forget(self, key: Hashable, call: _Call[T]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]
        if not call.future.done():
            call.future.cancel()
