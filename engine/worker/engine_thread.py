"""The engine thread: owns runner, engine core and transport; the event loop sends it calls through a queue."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from engine.core.engine import Engine
from engine.core.types import StepResult
from engine.worker.status import WorkerStatus
from kv_transfer.transports.poll_dealer import PollDealer
from kv_transfer.transports.transport import TransferEndpoint, Transport
from splitserve.errors import BrokenInvariantError, UnavailableError


class StepListener(Protocol):
    """What runs on the engine thread between steps: polls the transport, sends the outputs on."""

    def before_step(self, core: Engine, now: float) -> bool:
        """Handles what has arrived. True: call again within the poll interval, even if the core is idle."""

    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """Handles the result of a step that ended at `now`.

        The next step may already have begun; see `Engine` for what may not be called then.
        """

    def close(self) -> None:
        """Releases what belongs to the thread; called last."""


class KvConnector(StepListener, ABC):
    """Joins engine and transport on the engine thread; see `StepListener`."""

    def __init__(
        self, endpoint: TransferEndpoint, transport: Transport, polls: PollDealer, on_idle: Callable[[], None]
    ) -> None:
        """`polls` deals the transport's polls. `on_idle` is called on the engine thread when nothing is in progress any
        more; see `WorkerStatus`."""
        self.endpoint = endpoint
        self.polls = polls
        self._transport = transport
        self._on_idle = on_idle
        self._status = WorkerStatus()
        self._asleep = False

    @property
    def status(self) -> WorkerStatus:
        """The latest status, for any thread. Read it once if several fields must be consistent."""
        return self._status

    def before_step(self, core: Engine, now: float) -> bool:
        """See `StepListener`. The one place where a worker's transport is polled each time."""
        if self._asleep:
            return False
        self.polls.poll()
        return self.advance(core, now)

    @abstractmethod
    def advance(self, core: Engine, now: float) -> bool:
        """Handles what the last poll has brought, and what is due; returns what `before_step` does."""

    @property
    def at_rest(self) -> bool:
        """Whether no write is awaited, neither from here nor to here, and nobody waits for blocks."""
        now = self.status
        return not (now.in_progress or now.transfers_in_flight or now.waiting_reservations)

    def fall_asleep(self) -> None:
        """Closes the transport, whose memory is about to be given up. This connector takes no more requests: what comes
        after waking is another one's."""
        self._asleep = True
        self._transport.close()

    def require_awake(self) -> None:
        """Raises UnavailableError (SLEEPING) once the worker has fallen asleep."""
        if self._asleep:
            raise UnavailableError("the worker sleeps", reason="SLEEPING")

    def close(self) -> None:
        """Closes the transport; called last."""
        self._transport.close()

    def _publish(self, status: WorkerStatus) -> None:
        before, self._status = self._status, status
        if before.in_progress and not status.in_progress:
            self._on_idle()


L = TypeVar("L", bound=StepListener)
T = TypeVar("T")

_MAX_SLEEP_S = 3600.0
LENT_POLL_S = 0.002
"""Poll interval of a thread whose cores a neighbour uses: all of its threads wait for the one that was interrupted."""
BETWEEN_STEPS_S = 30.0
"""Time between two steps after which the engine counts as hung."""
BOOT_S = 600.0
"""Time after which the engine counts as hung while it falls asleep or wakes up: like a start it may pin much memory."""
EXPECTED_TIMES = 20.0
"""A step may take so many times as long as expected."""
MOST_TIMES = 10.0
"""A step may take at most so many times `hung_step_s`; also one of which nothing is expected yet."""


def step_limit_s(expected_s: float | None, hung_step_s: float) -> float:
    """Seconds after which a step counts as hung. `expected_s`: None while steps like it were not measured.

    `hung_step_s` is the setting `EngineConfig.hung_step_s`.
    """
    most_s = MOST_TIMES * hung_step_s
    return most_s if expected_s is None else min(max(hung_step_s, EXPECTED_TIMES * expected_s), most_s)


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """What the engine thread is busy with. A new object whenever it begins something; compared by identity."""

    what: Literal["in a step", "between two steps", "while it falls asleep", "while it wakes up"]
    limit_s: float
    """Time after which the thread counts as hung."""


class _Call(Generic[L, T]):
    """A function waiting to be run, and the future of its result."""

    def __init__(self, fn: Callable[[Engine, L], T], activity: Activity | None = None) -> None:
        self.future: Future[T] = Future()
        self.activity = activity
        self._fn = fn

    def run(self, core: Engine, listener: L) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(core, listener)
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, BrokenInvariantError):
                raise
        else:
            self.future.set_result(result)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(UnavailableError("the engine has stopped", reason="ENGINE_STOPPED"))


class _Post(_Call[L, T]):
    """A function without a result; its exception ends the thread."""

    def run(self, core: Engine, listener: L) -> None:
        self._fn(core, listener)


class EngineThread(Generic[L]):
    """Runs an engine on a dedicated thread.

    `factory` builds core and listener on that thread, because torch and NIXL objects belong to the thread that made
    them. All queued calls are run between two steps. An idle thread sleeps until a call comes, a deadline passes, or
    `idle_poll_s` seconds are over (`poll_interval_s` while the listener polls, `LENT_POLL_S` while cores are lent).

    If the device computes asynchronously, a step's result goes to the listener once the next step is queued, or at once
    if there is none; see `Engine.result_can_wait`.
    """

    def __init__(
        self,
        factory: Callable[[], tuple[Engine, L]],
        *,
        name: str,
        poll_interval_s: float = 0.0002,
        idle_poll_s: float = _MAX_SLEEP_S,
        hung_step_s: float = float("inf"),
    ) -> None:
        """`hung_step_s`: see `EngineConfig.hung_step_s`; it only sets the limits in `activity`."""
        self.died: asyncio.Future[None]
        """Created by `start`. Fails with the exception that ended the loop; has a result after `stop`."""
        self._factory = factory
        self._listener: L
        self._poll_interval_s = poll_interval_s
        self.idle_poll_s = idle_poll_s
        """Set it by `factory` at the latest."""
        self._hung_step_s = hung_step_s
        self._calls: queue.SimpleQueue[_Call[L, Any]] = queue.SimpleQueue()
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
        # Retrieves the exception, so that asyncio does not log it as lost; the worker reports it when it stops.
        self.died.add_done_callback(lambda died: died.cancelled() or died.exception())
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def call(self, fn: Callable[[Engine, L], T], activity: Activity | None = None) -> T:
        """Runs `fn` between two steps and returns its result or raises its exception; only a BrokenInvariantError ends
        the thread, too. `activity`: what that is, where it may take longer than `BETWEEN_STEPS_S`.

        A call that is cancelled before it begins does not run; one that has begun runs to its end. Raises
        UnavailableError (ENGINE_STOPPED) if the thread has ended.
        """
        call: _Call[L, T] = _Call(fn, activity)
        self._put(call)
        return await asyncio.wrap_future(call.future)

    def post(self, fn: Callable[[Engine, L], object]) -> None:
        """Runs `fn` between two steps, without waiting. An exception ends the thread. Ignored once it has ended."""
        self._put(_Post(fn))

    def replace_listener(self, listener: L) -> None:
        """From the next turn on calls and steps go to this one. For the engine thread, while no step is under way; the
        caller has closed what the one before held."""
        self._listener = listener

    def activity(self) -> Activity | None:
        """What the thread is busy with, for any thread; None while it starts, sleeps or ends."""
        return self._activity

    async def stop(self) -> None:
        """Ends the loop after the calls that are queued, closes listener and core on the thread, and joins it.

        Idempotent. Does not raise the exception that ended the loop; see `died`.
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
            core, self._listener = self._factory()
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
                self._listener.close()
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
                    self._run(self._calls.get_nowait(), core)
                polling = self._listener.before_step(core, time.monotonic())
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
        """Passes the latest step's result to the listener; False if there is none."""
        self._between_steps()
        result = core.take_result()
        if result is None:
            return False
        self._listener.after_step(core, result, self._step_ended_s)
        return True

    def _sleep(self, core: Engine, *, polling: bool) -> None:
        timeout = min(core.next_deadline() - time.monotonic(), self.idle_poll_s)
        if polling:
            timeout = min(timeout, LENT_POLL_S if core.lent else self._poll_interval_s)
        if timeout <= 0:
            return
        self._activity = None
        try:
            call = self._calls.get(timeout=timeout)
        except queue.Empty:
            return
        self._between_steps()
        self._run(call, core)

    def _run(self, call: _Call[L, Any], core: Engine) -> None:
        if call.activity is None:
            call.run(core, self._listener)
            return
        self._activity = call.activity
        call.run(core, self._listener)
        self._between_steps()

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
