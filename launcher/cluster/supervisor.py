"""Supervisor of a local cluster: starts coordinators and workers, restarts and drains them.

It manages processes independently of what they serve: `ChildSpec`s say what to start, a probe tells whether the
cluster is ready, and an observer shows progress. Workers can be added and removed at run time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from launcher.cluster.child_process import ChildProcess, ChildSpec, Event, RestartPolicy, describe_exit
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from splitserve.rpc.status import known_error

READY_POLL_S = 0.05

Probe = Callable[[], Awaitable[str | None]]
"""Returns the served model's name once the whole cluster is ready, else None. UnavailableError means not yet."""


READY_EVENTS = frozenset({"coordinator.ready", "worker.ready"})
LOADING_EVENT = "worker.loading"
COMPILING_EVENT = "engine.compiling_kernels"
WRONG_SETTING = 2
"""Exit code of a service that was given a wrong setting, as the command line's."""


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """Time limits in seconds."""

    ready_s: float = 300.0
    drain_s: float = 30.0
    """Drain time of the coordinators, and then of the workers."""
    unready_drain_s: float = 3.0
    """Drain time before the cluster was ready or after it failed, when there is nothing to drain. A child that needs
    longer to end by itself has a `ChildSpec.least_stop_s`."""
    drain_margin_s: float = 2.0
    """Added to both drain times, as the children have the same deadlines."""


class ClusterObserver(Protocol):
    """Shows progress to people. Called on the event loop; must not block."""

    def message(self, text: str) -> None:
        """Shows a one-line message."""

    def ready(self, model: str) -> None:
        """The whole cluster serves this model. Called once."""

    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        """A line of a child's output, and the log event if the line is one."""


@dataclass(slots=True, eq=False)
class SupervisedProcess:
    """A child process and its supervision state."""

    child: ChildProcess
    elastic: bool = False
    """Added at run time: a crash loop gives up this process instead of the cluster."""
    started_wall_s: float = 0.0
    """Time of the last start, in seconds since the epoch."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it shall end without a restart."""
    deaths: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the child."""
        return self.child.spec.name


class LocalCluster:
    """Owns all child processes. Call `run` once; the other methods control it meanwhile."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        probe: Probe,
        observer: ClusterObserver,
        *,
        times: ClusterTimes | None = None,
        policy: RestartPolicy | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to that of all children."""
        self._environment = dict(environment or {})
        self._processes = {spec.name: SupervisedProcess(self._child(spec)) for spec in specs}
        self._group: asyncio.TaskGroup | None = None
        self._observer = observer
        self._times = times or ClusterTimes()
        self._policy = policy or RestartPolicy()
        self._probe = probe
        self.stopping = asyncio.Event()
        """Set once the cluster shall end."""
        self.was_ready = asyncio.Event()
        self.was_killed = False

    @property
    def processes(self) -> list[SupervisedProcess]:
        """All processes that shall run or have not ended yet."""
        return list(self._processes.values())

    async def run(self) -> None:
        """Runs the cluster until `request_stop`. No child is left running, however it ends.

        Raises UnavailableError with the child's last error if a child dies before the cluster is ready
        (CHILD_FAILED; InvalidArgumentError if it was given a wrong setting) or repeatedly (CRASH_LOOP), and
        DeadlineExceededError (NOT_READY).
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for process in self.processes:
                    group.create_task(self._supervise(process, started=False))
                readiness = group.create_task(self._watch_ready())
                await self.stopping.wait()
                readiness.cancel()
                await self._drain(
                    self._times.drain_s if self.was_ready.is_set() else self._times.unready_drain_s
                )
        except BaseExceptionGroup as errors:
            known = known_error(errors)
            if known is None:
                raise
            await self._drain(self._times.unready_drain_s)
            raise known from None
        finally:
            running = [process.child for process in self.processes if process.child.running]
            for child in running:
                child.kill()
            for child in running:
                await asyncio.shield(child.wait())

    async def add(self, spec: ChildSpec) -> None:
        """Starts and supervises one more worker.

        Raises UnavailableError (STOPPING, START_FAILED) and FailedPreconditionError (NAME_TAKEN).
        """
        if self._group is None or self.stopping.is_set():
            raise UnavailableError("the cluster is not running", reason="STOPPING")
        if spec.name in self._processes:
            raise FailedPreconditionError(f"{spec.name} exists already", reason="NAME_TAKEN")
        process = SupervisedProcess(self._child(spec), elastic=True)
        self._processes[spec.name] = process
        try:
            if not await self._start(process):
                raise UnavailableError("the cluster is not running", reason="STOPPING")
        except OSError as error:
            del self._processes[spec.name]
            message = f"{spec.name} cannot be started: {error.strerror}"
            raise UnavailableError(message, reason="START_FAILED") from None
        except BaseException:
            del self._processes[spec.name]
            raise
        self._group.create_task(self._supervise(process, started=True))

    def remove(self, name: str, drain_s: float) -> None:
        """Drains and ends a worker in the background; kills it after `drain_s` seconds.

        Unknown names and workers that are leaving already are ignored.
        """
        process = self._processes.get(name)
        if self._group is None or process is None or process.leaving.is_set():
            return
        process.leaving.set()
        if process.child.running:
            self._observer.message(f"{name}: draining")
            self._group.create_task(self._end([process.child], drain_s + self._times.drain_margin_s))

    def request_stop(self) -> None:
        """Starts the drain: coordinators first, then workers."""
        self.stopping.set()

    def kill_now(self) -> None:
        """Kills all processes."""
        self.was_killed = True
        self.stopping.set()
        for process in self.processes:
            process.child.kill()

    def _child(self, spec: ChildSpec) -> ChildProcess:
        return ChildProcess(spec, self._on_line, self._environment)

    def _on_line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        self._observer.line(spec, line, event)
        if event is None:
            return
        if event["event"] in READY_EVENTS:
            if process := self._processes.get(spec.name):
                process.deaths.clear()
            self._observer.message(f"{spec.name}: ready")
        elif event["event"] == LOADING_EVENT:
            self._observer.message(f"{spec.name}: loading weights")
        elif event["event"] == COMPILING_EVENT:
            self._observer.message(f"{spec.name}: compiling the kernels for this processor, once")

    async def _start(self, process: SupervisedProcess) -> bool:
        """Starts a process. False if the cluster shall end: then it starts none."""
        if self.stopping.is_set():
            return False
        child = process.child
        process.started_wall_s = time.time()  # set before the start, so that a running child always has it
        await child.start()
        layout = f", {child.spec.layout}" if child.spec.layout else ""
        self._observer.message(f"{child.spec.name}: started, pid {child.pid}{layout}")
        if process.leaving.is_set():
            child.terminate()  # `remove` was called while it was not running
        if self.stopping.is_set():
            child.kill()  # the drain may have missed a child that was not running yet; the child serves nobody yet
        return True

    async def _supervise(self, process: SupervisedProcess, *, started: bool) -> None:
        """Restarts a child whenever it ends, until it shall end or, if it is elastic, is given up."""
        while started or await self._start(process):
            started = False
            code = await process.child.wait()
            if self.stopping.is_set():
                return
            delay_s = None if process.leaving.is_set() else self._after_death(process, code)
            if delay_s is None or await self._wait_until_leaving(process, delay_s):
                break
        del self._processes[process.name]
        if process.leaving.is_set():
            self._observer.message(f"{process.name}: ended")

    async def _wait_until_leaving(self, process: SupervisedProcess, wait_s: float) -> bool:
        """Waits up to `wait_s` seconds; returns whether the process or the cluster shall end."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.stopping, process.leaving)]
        try:
            done, _ = await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return bool(done)

    def _after_death(self, process: SupervisedProcess, code: int) -> float | None:
        """Seconds until the next start; None to give up."""
        what = f"{process.name} {describe_exit(code)}"
        why = f": {process.child.last_error}" if process.child.last_error else ""
        if not self.was_ready.is_set():
            kind = InvalidArgumentError if code == WRONG_SETTING else UnavailableError
            raise kind(f"{what} before the cluster was ready{why}", reason="CHILD_FAILED")
        now = time.monotonic()
        process.deaths.append(now)
        delay_s = self._policy.delay_s(process.deaths, now)
        if delay_s is None and process.elastic:
            self._observer.message(f"{what} again and again, given up{why}")
            return None
        if delay_s is None:
            raise UnavailableError(f"{what} again and again{why}", reason="CRASH_LOOP")
        self._observer.message(f"{what}; starting it again in {delay_s:g} s{why}")
        return delay_s

    async def _watch_ready(self) -> None:
        try:
            async with asyncio.timeout(self._times.ready_s):
                model = await self._served_model()
        except TimeoutError:
            errors = [(process.name, process.child.last_error) for process in self.processes]
            why = "".join(f"; {name} last said: {error}" for name, error in errors if error)
            message = f"the cluster was not ready within {self._times.ready_s:g} s{why}"
            raise DeadlineExceededError(message, reason="NOT_READY") from None
        self.was_ready.set()
        self._observer.ready(model)

    async def _served_model(self) -> str:
        """Waits until the cluster is ready; returns the served model's name."""
        while True:
            with suppress(UnavailableError, DeadlineExceededError):
                if (model := await self._probe()) is not None:
                    return model
            await asyncio.sleep(READY_POLL_S)

    async def _drain(self, drain_s: float) -> None:
        self.stopping.set()
        deadline_s = drain_s + self._times.drain_margin_s
        children = [process.child for process in self.processes]
        coordinators = [child for child in children if child.spec.role == "coordinator"]
        workers = [child for child in children if child.spec.role != "coordinator"]
        # Running requests need the workers until the coordinators have finished them.
        for stage in (coordinators, workers):
            await self._end([child for child in stage if child.running], deadline_s)

    async def _end(self, children: Sequence[ChildProcess], deadline_s: float) -> None:
        if not children:
            return
        for child in children:
            child.terminate()
        await asyncio.gather(*(self._end_within(deadline_s, child) for child in children))

    async def _end_within(self, deadline_s: float, child: ChildProcess) -> None:
        if child.spec.least_stop_s:
            deadline_s = max(deadline_s, child.spec.least_stop_s + self._times.drain_margin_s)
        end = asyncio.create_task(child.wait())
        await asyncio.wait([end], timeout=deadline_s)
        if child.running:
            self._observer.message(f"{child.spec.name}: did not end within {deadline_s:g} s, killed")
            child.kill()
        await asyncio.wait([end])
