"""The engine thread: owns runner, engine core and transport; the event loop sends it calls through a queue.

The event loop watches the engine thread: if the thread hangs, in a step on the device or between two, the process ends.
Only time in which the event loop itself ran counts, so a process or a machine that was stopped does not count as hung.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import override

from engine.core.engine import Engine
from kv_transfer.transports.transport import POLL_INTERVAL_S
from splitserve.errors import BrokenInvariantError, UnavailableError
from splitserve.logs import log_event
from splitserve.runtime.process import leave_at_once
from splitserve.runtime.waiting import OwnClock
from worker.connector import KvConnector

T = TypeVar("T")

_MAX_SLEEP_S = 3600.0
"""Longest sleep of an idle engine thread, until the worker knows how often its transport must be polled."""
BETWEEN_STEPS_S = 30.0
"""Time between two steps after which the engine counts as hung."""
EXPECTED_TIMES = 20.0
"""A step may take this many times as long as expected."""
MOST_TIMES = 10.0
"""A step may take at most this many times `hung_step_s`, also while no time is expected yet."""


def step_limit_s(expected_s: float | None, hung_step_s: float) -> float:
    """Seconds after which a step counts as hung. `expected_s`: None while steps like it were not measured.

    `hung_step_s` is the setting `EngineConfig.hung_step_s`.
    """
    most_s = MOST_TIMES * hung_step_s
    return most_s if expected_s is None else min(max(hung_step_s, EXPECTED_TIMES * expected_s), most_s)


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """What the engine thread is busy with. A new object whenever it begins something; compared by identity."""

    what: Literal["in a step", "between two steps"]
    limit_s: float
    """Time after which the thread counts as hung."""


class _Call(Generic[T]):
    """A function waiting to be run, and the future of its result."""

    def __init__(self, fn: Callable[[Engine], T]) -> None:
        self.future: Future[T] = Future()
        self._fn = fn

    def run(self, core: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(core)
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, BrokenInvariantError):
                raise
        else:
            self.future.set_result(result)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(UnavailableError("the engine has stopped", reason="ENGINE_STOPPED"))


class _Post(_Call[T]):
    """A function without a result; its exception ends the thread."""

    @override
    def run(self, core: Engine) -> None:
        self._fn(core)


class EngineThread:
    """Runs an engine on a dedicated thread.

    `factory` builds engine and connector on that thread, because torch and NIXL objects belong to the thread that made
    them. All queued calls are run between two steps. An idle thread sleeps until a call comes, a deadline passes, or
    `idle_poll_s` seconds are over (`poll_interval_s` while the connector polls).

    If the device computes asynchronously, a step's result goes to the connector once the next step is queued, or at
    once if there is none; see `Engine.result_can_wait`.
    """

    def __init__(
        self,
        factory: Callable[[], tuple[Engine, KvConnector]],
        *,
        name: str,
        hung_step_s: float = float("inf"),
    ) -> None:
        """`hung_step_s`: see `EngineConfig.hung_step_s`; it only sets the limits in `activity`."""
        self.died: asyncio.Future[None]
        """Created by `start`. Fails with the exception that ended the loop; has a result after `stop`."""
        self._factory = factory
        self._connector: KvConnector
        self.poll_interval_s = POLL_INTERVAL_S
        self.idle_poll_s = _MAX_SLEEP_S
        """`factory` may set both."""
        self._hung_step_s = hung_step_s
        self._calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._activity: Activity | None = None
        self._step_ended_s = 0.0
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()

    async def start(self) -> None:
        """Starts the thread and waits until the factory is done; raises what the factory raised."""
        self.died = asyncio.wrap_future(self._ended)
        # Retrieves the exception, so that asyncio does not log it as never retrieved; the worker reports it.
        self.died.add_done_callback(lambda died: died.cancelled() or died.exception())
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Runs `fn` between two steps and returns its result or raises its exception. Of exceptions only a
        BrokenInvariantError also ends the thread.

        A call that is cancelled before it begins does not run; one that has begun runs to its end. Raises
        UnavailableError (ENGINE_STOPPED) if the thread has ended.
        """
        call: _Call[T] = _Call(fn)
        self._put(call)
        return await asyncio.wrap_future(call.future)

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Runs `fn` between two steps, without waiting. An exception ends the thread. Ignored once it has ended."""
        self._put(_Post(fn))

    def activity(self) -> Activity | None:
        """What the thread is busy with, for any thread; None while it starts, sleeps or ends."""
        return self._activity

    async def stop(self) -> None:
        """Ends the loop after the calls that are queued, closes connector and engine on the thread, and joins it.

        Idempotent. Does not raise the exception that ended the loop; see `died`.
        """
        if self._thread.ident is None:
            return
        self._put(_Post(lambda _core: self._end_loop()))
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    def _end_loop(self) -> None:
        self._stopping = True

    def _put(self, call: _Call[Any]) -> None:
        with self._lock:
            if not self._closed:
                self._calls.put(call)
                return
        call.refuse()

    def _main(self) -> None:
        try:
            core, self._connector = self._factory()
        except BaseException as error:
            self._started.set_exception(error)
            self._finish(error)
            return
        self._started.set_result(None)
        try:
            try:
                self._loop(core)
            except BaseException as error:
                self._finish(error)  # before closing, which may hang on a broken device
            finally:
                self._activity = None
                self._connector.close()
                core.close()
        except BaseException as error:
            self._finish(error)
        else:
            self._finish(None)

    def _loop(self, core: Engine) -> None:
        try:
            while not self._stopping:
                self._between_steps()
                for _ in range(self._calls.qsize()):
                    self._calls.get_nowait().run(core)
                polling = self._connector.before_step(core, time.monotonic())
                core.collect()
                if not core.result_can_wait:
                    self._deliver(core)
                if core.has_work():
                    self._step(core)
                elif not self._stopping and not self._deliver(core):
                    self._sleep(core, polling=polling)
        finally:
            self._deliver(core)

    def _between_steps(self) -> None:
        self._activity = Activity("between two steps", BETWEEN_STEPS_S)

    def _computing(self, expected_s: float | None) -> None:
        self._activity = Activity("in a step", step_limit_s(expected_s, self._hung_step_s))

    def _step(self, core: Engine) -> None:
        core.begin_step(self._computing)
        computing = self._activity
        self._deliver(core)
        self._activity = computing
        core.finish_step()
        self._between_steps()
        self._step_ended_s = time.monotonic()
        if not core.result_can_wait:
            self._deliver(core)

    def _deliver(self, core: Engine) -> bool:
        """Passes the latest step's result to the connector; False if there is none."""
        self._between_steps()
        result = core.take_result()
        if result is None:
            return False
        self._connector.after_step(core, result, self._step_ended_s)
        return True

    def _sleep(self, core: Engine, *, polling: bool) -> None:
        timeout = min(core.next_deadline() - time.monotonic(), self.idle_poll_s)
        if polling:
            timeout = min(timeout, self.poll_interval_s)
        if timeout <= 0:
            return
        self._activity = None
        try:
            call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return
        self._between_steps()
        call.run(core)

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        while not self._calls.empty():
            self._calls.get_nowait().refuse()
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


CHECK_S = 0.25
MAX_TICK_S = 2 * CHECK_S
GOODBYE_S = 1.0
"""How long the process may take to say that it serves no more."""
CLOSE_S = 60.0
"""How long an engine may take to close: to finish its step, end its processes, and free memory that is pinned."""
DEAD_CLOSE_S = 10.0
"""How long an engine whose thread has died may take to close."""
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
        """Whether the thread hangs. Call it again and again. `activity` is None while the thread sleeps."""
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

    Before that it logs one line, writes every thread's Python stack to stderr, and calls `not_serving`.
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
    """Waits for the engine to end by `stop`; raises what `stop` raises. If the engine has not ended after `limit_s`
    seconds, logs that with every thread's Python stack and ends the process by `leave` with EXIT_CODE."""
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait([stopping], timeout=limit_s)
    if not stopping.done():
        log_event("engine.stop_overdue", level=logging.ERROR, worker_id=worker_id, seconds=limit_s)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        leave(EXIT_CODE)
    await stopping
