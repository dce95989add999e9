"""A thread that copies blocks for the engine thread, beside its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class CopyThread:
    """Runs jobs one at a time, urgent ones first, each kind in order. A job handles its own errors."""

    def __init__(self, name: str) -> None:
        self._waiting: tuple[deque[Job], deque[Job]] = deque(), deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Jobs that have not ended."""
        with self._changed:
            return sum(map(len, self._waiting)) + self._running

    def put(self, job: Job, *, urgent: bool = False) -> None:
        """Queues a job; ignored once closed."""
        with self._changed:
            if not self._closed:
                self._waiting[not urgent].append(job)
                self._changed.notify()

    def close(self, patience_s: float) -> bool:
        """Drops the jobs that have not begun and waits for the one that has; False if it has not ended in time."""
        with self._changed:
            self._closed = True
            for queue in self._waiting:
                queue.clear()
            self._changed.notify()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._closed or any(self._waiting))
                if self._closed:
                    return
                job = next(queue for queue in self._waiting if queue).popleft()
                self._running = True
            job()
