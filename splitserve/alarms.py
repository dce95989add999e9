"""Calls at a later time, all of one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from splitserve.queues import LazyHeap


class Alarm:
    """A call that is due at some time, unless it is cancelled before."""

    def __init__(self, call: Callable[[], None], cancel: Callable[[Alarm], None]) -> None:
        self.call = call
        self._cancel = cancel

    def cancel(self) -> None:
        """On any thread. A call that has begun goes on."""
        self._cancel(self)


class Alarms:
    """Makes calls when they are due, on a thread of its own that begins with the first. For any thread."""

    def __init__(self, name: str) -> None:
        self._due: LazyHeap[float, Alarm] = LazyHeap()
        self._changed = threading.Condition()
        self._closed = False
        self._name = name
        self._thread: threading.Thread | None = None

    def now(self) -> float:
        """Seconds on the clock of the alarms."""
        return time.monotonic()

    def set(self, seconds: float, call: Callable[[], None]) -> Alarm | None:
        """Has `call`, which must not raise, called after so long; None if there can be no more threads, or once
        closed."""
        with self._changed:
            if self._closed or not self._begun():
                return None
            alarm = Alarm(call, self._discard)
            self._due.push(self.now() + seconds, alarm)
            self._changed.notify()
            return alarm

    def close(self) -> None:
        """Drops what is not due yet, and ends the thread; it may be in a last call."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _begun(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _discard(self, alarm: Alarm) -> None:
        with self._changed:
            self._due.discard(alarm)

    def _main(self) -> None:
        while (alarm := self._next()) is not None:
            alarm.call()

    def _next(self) -> Alarm | None:
        """Waits for the next one that is due; None once closed."""
        with self._changed:
            while not self._closed:
                first = self._due.peek()
                wait_s = None if first is None else min(first[0] - self.now(), threading.TIMEOUT_MAX)
                if wait_s is not None and wait_s <= 0:
                    return self._due.pop()
                self._changed.wait(wait_s)
            return None
