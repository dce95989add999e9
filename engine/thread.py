"""One thread owns the runner, the engine core and the transport; asyncio talks to it through a queue."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from engine.core import EngineCore
from engine.types import StepResult
from splitserve.errors import UnavailableError


class StepListener(Protocol):
    """What else lives on the engine thread: transports and whoever sends the outputs on."""

    def before_step(self, core: EngineCore, now: float) -> bool:
        """Polls what has arrived. True: call again within the poll interval even if the core is idle."""

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        """Takes the outputs of a step, which ended at `now`.

        The next step may be under way by then; see `EngineCore` for what must wait.
        """

    def close(self) -> None:
        """Releases what belongs to the thread; called last."""


L = TypeVar("L", bound=StepListener)
T = TypeVar("T")

_MAX_SLEEP_S = 3600.0


class _Call(Generic[L, T]):
    """A function waiting for its turn, and who waits for its result."""

    def __init__(self, fn: Callable[[EngineCore, L], T]) -> None:
        self.future: Future[T] = Future()
        self._fn = fn

    def run(self, core: EngineCore, listener: L) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(core, listener)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(UnavailableError("the engine has stopped", reason="ENGINE_STOPPED"))


class _Post(_Call[L, T]):
    """A function whose result nobody waits for; its exception ends the thread."""

    def run(self, core: EngineCore, listener: L) -> None:
        self._fn(core, listener)


class EngineThread(Generic[L]):
    """Runs an engine on a thread of its own.

    `factory` builds core and listener on that thread, because torch and NIXL objects belong to the thread
    that made them. Between two steps all queued calls are run. Idle, the thread sleeps until a call
    comes, a deadline passes, or `idle_poll_s` is over; while the listener wants polling, `poll_interval_s`.

    Where the device computes while the host does other things, a step's outputs go to the listener once the next step
    is queued, or at once if there is none; see `EngineCore.result_can_wait`.
    """

    def __init__(
        self,
        factory: Callable[[], tuple[EngineCore, L]],
        *,
        name: str,
        poll_interval_s: float = 0.0002,
        idle_poll_s: float = _MAX_SLEEP_S,
    ) -> None:
        self.died: asyncio.Future[None]
        """Made by `start`. Fails with the exception that ended the loop; has a result after `stop`."""
        self._factory = factory
        self._poll_interval_s = poll_interval_s
        self._idle_poll_s = idle_poll_s
        self._calls: queue.SimpleQueue[_Call[L, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._between_steps_since_s: float | None = None
        self._step_ended_s = 0.0
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()

    async def start(self) -> None:
        """Starts the thread and waits until the factory is done; raises what the factory raised."""
        self.died = asyncio.wrap_future(self._ended)
        # An error that nobody asks for is reported by whoever stops the worker, not by the garbage collector.
        self.died.add_done_callback(lambda died: died.cancelled() or died.exception())
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def call(self, fn: Callable[[EngineCore, L], T]) -> T:
        """Runs `fn` between two steps and returns its result or raises its exception.

        A call cancelled before its turn does not run; one that has begun runs to its end. Raises
        UnavailableError (ENGINE_STOPPED) when the thread has ended.
        """
        call: _Call[L, T] = _Call(fn)
        self._put(call)
        return await asyncio.wrap_future(call.future)

    def post(self, fn: Callable[[EngineCore, L], object]) -> None:
        """Runs `fn` between two steps. An exception of it ends the thread. Dropped after the end."""
        self._put(_Post(fn))

    def between_steps_s(self) -> float:
        """How long the thread has been at what it does between two steps; 0 while it computes or sleeps."""
        since_s = self._between_steps_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def stop(self) -> None:
        """Ends the loop after what is queued already, closes listener and core on the thread, joins it.

        Idempotent. Does not raise what the loop died of; see `died`.
        """
        if self._thread.ident is None:
            return
        self._put(_Post(lambda _core, _listener: self._end_loop()))
        await asyncio.shield(asyncio.to_thread(self._thread.join))

    def _end_loop(self) -> None:
        self._stopping = True

    def _put(self, call: _Call[L, Any]) -> None:
        with self._lock:
            if not self._closed:
                self._calls.put(call)
                return
        call.refuse()

    def _main(self) -> None:
        try:
            core, listener = self._factory()
        except BaseException as error:
            self._started.set_exception(error)
            self._finish(error)
            return
        self._started.set_result(None)
        try:
            try:
                self._loop(core, listener)
            except BaseException as error:
                self._finish(error)  # Told before closing, which may hang on a broken device.
            finally:
                self._between_steps_since_s = None
                listener.close()
                core.close()
        except BaseException as error:
            self._finish(error)
        else:
            self._finish(None)

    def _loop(self, core: EngineCore, listener: L) -> None:
        try:
            while not self._stopping:
                self._between_steps_since_s = time.monotonic()
                for _ in range(self._calls.qsize()):
                    self._calls.get_nowait().run(core, listener)
                polling = listener.before_step(core, time.monotonic())
                if core.has_work():
                    self._step(core, listener)
                elif not self._stopping and not self._deliver(core, listener):
                    self._sleep(core, listener, polling=polling)
        finally:
            self._deliver(core, listener)

    def _step(self, core: EngineCore, listener: L) -> None:
        self._between_steps_since_s = None
        core.begin_step()
        self._deliver(core, listener)
        self._between_steps_since_s = None
        core.finish_step()
        self._step_ended_s = self._between_steps_since_s = time.monotonic()
        if not core.result_can_wait:
            self._deliver(core, listener)

    def _deliver(self, core: EngineCore, listener: L) -> bool:
        """Hands over what the latest step produced; False if that has been done."""
        self._between_steps_since_s = time.monotonic()
        result = core.take_result()
        if result is None:
            return False
        listener.after_step(core, result, self._step_ended_s)
        return True

    def _sleep(self, core: EngineCore, listener: L, *, polling: bool) -> None:
        timeout = min(core.next_deadline() - time.monotonic(), self._idle_poll_s)
        if polling:
            timeout = min(timeout, self._poll_interval_s)
        if timeout <= 0:
            return
        self._between_steps_since_s = None
        try:
            call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return
        self._between_steps_since_s = time.monotonic()
        call.run(core, listener)

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
