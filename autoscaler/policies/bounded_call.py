"""Bounds how long a policy's own code is waited for: it runs on a thread, which can be left behind but not ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from autoscaler.policies.recommendation import PoolStatus, Recommend, Recommendation
from autoscaler.snapshot import Snapshot

CALL_S = 1.0
"""How long one recommendation is waited for, on the thread of its decision."""
LOAD_S = 10.0
"""How long loading and trying a function may take."""

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """A call under way on a daemon thread of its own."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._value: T
        self._error: Exception | None = None
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, wait_s: float) -> T:
        """What the function returns. Raises what it raises, RuntimeError in place of what is no Exception, and
        TimeoutError if it has not returned in `wait_s` seconds: ask again later, or forget it."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise TimeoutError(f"has not returned for {time.monotonic() - self._began_s:.0f} s")
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:  # raised again where the result is asked for
            self._error = error
        except BaseException as error:
            # Nobody interrupts this thread: it is the function's own, a SystemExit or the panic of an extension, and
            # is to end nothing but the call.
            said = RuntimeError(str(error) or type(error).__name__)
            self._error = said.with_traceback(error.__traceback__)


class BoundedFunction:
    """A pool's function that answers within `limit_s` or keeps the count. One that is overdue is not called again
    until it has returned; what it then says is about the past, and goes unused."""

    def __init__(self, function: Recommend, pool: str, limit_s: float | None = None) -> None:
        self._function, self._pool = function, pool
        self._limit_s = CALL_S if limit_s is None else limit_s
        self._overdue: BoundedCall[tuple[Recommendation, Any]] | None = None

    def __call__(self, memory: Any, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, Any]:
        """As `Recommend`. After an overdue call it begins with a new memory, as after an error."""
        late = self._overdue
        try:
            if late is not None:
                late.result(0.0)
            # Kept before it is waited for: an interrupt of the wait leaves it under way.
            self._overdue = BoundedCall(
                lambda: self._function(memory, snapshot, status), f"policy {self._pool}"
            )
            answer = self._overdue.result(self._limit_s)
        except TimeoutError as error:
            why = f"{self._pool}.function: {error}"
            return Recommendation(
                status.current, "custom policy is overdue: count kept", 0.0, error=why
            ), None
        self._overdue = None
        return answer
