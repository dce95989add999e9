"""Notices an engine thread that hangs, in a step on the device or between two steps, from outside that thread.

The watcher's own clock decides: a process or a machine that was stopped has not hung, however long it took.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from engine.worker.engine_thread import Activity
from splitserve.logs import log_event
from splitserve.runtime.own_clock import OwnClock
from splitserve.runtime.process import leave_at_once

CHECK_S = 0.25
MAX_TICK_S = 2 * CHECK_S
GOODBYE_S = 1.0
"""How long the process may take to say that it serves no more."""
CLOSE_S = 60.0
"""How long an engine may take to close: the step that it computes, its processes, and memory that is pinned."""
DEAD_CLOSE_S = 10.0
"""The same of one that has died."""
EXIT_CODE = 70
"""EX_SOFTWARE in sysexits.h."""


class HangClock:
    """Adds up how long one activity has lasted, in the watcher's time. Pure."""

    def __init__(self, now: float, max_tick_s: float = MAX_TICK_S) -> None:
        self._clock = OwnClock(now, max_tick_s)
        self._activity: Activity | None = None
        self.seconds = 0.0
        """How long the activity of the last look has lasted."""

    def look(self, activity: Activity | None, now: float) -> bool:
        """Whether the thread hangs. None: it sleeps. Call it again and again."""
        tick_s = self._clock.tick(now)
        if activity is None or activity is not self._activity:
            self._activity, self.seconds = activity, 0.0
            return False
        self.seconds += tick_s
        return self.seconds >= activity.limit_s


async def watch_for_hangs(
    activity: Callable[[], Activity | None],
    worker_id: str,
    not_serving: Callable[[], Awaitable[None]],
    *,
    check_s: float = CHECK_S,
    leave: Callable[[int], object] = leave_at_once,
) -> None:
    """Runs until cancelled. Once the engine thread hangs, ends the process by `leave` with EXIT_CODE.

    Logs one line, writes every thread's Python stack to stderr, and calls `not_serving` before.
    """
    clock = HangClock(time.monotonic(), 2 * check_s)
    while not clock.look(doing := activity(), time.monotonic()):  # noqa: ASYNC110 - a hung thread signals nothing
        await asyncio.sleep(check_s)
    assert doing is not None
    error = f"the engine hangs {doing.what}"
    log_event(
        "engine.hung",
        level=logging.ERROR,
        worker_id=worker_id,
        during=doing.what,
        seconds=round(clock.seconds, 1),
        limit_s=round(doing.limit_s, 1),
        error=f"{error}, for {clock.seconds:.0f} s now: the process ends with code {EXIT_CODE} to be replaced",
    )
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    try:
        async with asyncio.timeout(GOODBYE_S):
            await not_serving()
    finally:
        leave(EXIT_CODE)


async def end_engine(
    stop: Coroutine[Any, Any, None],
    worker_id: str,
    limit_s: float,
    leave: Callable[[int], object] = leave_at_once,
) -> None:
    """Waits for an engine that is told to end. One that has not ended after `limit_s` seconds ends the process by
    `leave` with EXIT_CODE, once it is logged with every thread's Python stack. Raises what `stop` raises."""
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait([stopping], timeout=limit_s)
    if not stopping.done():
        log_event("engine.stop_overdue", level=logging.ERROR, worker_id=worker_id, seconds=limit_s)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        leave(EXIT_CODE)
    await stopping
