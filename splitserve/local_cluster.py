"""The supervisor of a local cluster: starts coordinator and workers, keeps them alive, drains them.

It knows processes, not what they serve: what to start comes as `ChildSpec`s, whether the whole is ready from a
probe, and what people see goes to an observer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from splitserve.child_process import ChildProcess, ChildSpec, Event, describe_exit
from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.restart_policy import RestartPolicy
from splitserve.rpc_errors import known_error

READY_POLL_S = 0.1
READY_EVENTS = frozenset({"coordinator.ready", "worker.ready"})
LOADING_EVENT = "worker.loading"

Probe = Callable[[], Awaitable[str | None]]
"""The name of the served model once the whole cluster is ready, else None. UnavailableError means: not yet."""


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """How long things may take, in seconds."""

    ready_s: float = 300.0
    drain_s: float = 30.0
    """How long the coordinator, and then the workers, may take to end what they have begun."""
    unready_drain_s: float = 3.0
    """The same before the cluster was ready or after it failed: there is nothing to drain."""
    drain_margin_s: float = 2.0
    """Added to both, because the children's own deadlines are the same."""


class ClusterObserver(Protocol):
    """Shows people what happens. Called on the event loop; must not block."""

    def message(self, text: str) -> None:
        """Something that people should know, in one line."""

    def loading(self, name: str, fraction: float) -> None:
        """A worker has loaded this part of its weights, 0..1."""

    def ready(self, model: str) -> None:
        """The whole cluster serves this model. Called once."""

    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        """One line of a child's output, and the log event in it where it is one."""


class LocalCluster:
    """Owns the child processes from start to end. `run` once; the other methods steer it from outside."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        probe: Probe,
        observer: ClusterObserver,
        *,
        times: ClusterTimes | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._children = [ChildProcess(spec, self._on_line) for spec in specs]
        self._deaths: dict[str, list[float]] = {spec.name: [] for spec in specs}
        self._probe = probe
        self._observer = observer
        self._times = times or ClusterTimes()
        self._policy = policy or RestartPolicy()
        self._stop = asyncio.Event()
        self._was_ready = False
        self.was_killed = False

    async def run(self) -> None:
        """Runs the cluster until `request_stop`; at the end no child is left, however it ended.

        Raises UnavailableError when a child dies before the cluster was ready (CHILD_FAILED) or again and again
        (CRASH_LOOP), with the child's last error in it, and DeadlineExceededError (NOT_READY).
        """
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    await self._start(child)
                    group.create_task(self._keep(child))
                readiness = group.create_task(self._watch_ready())
                await self._stop.wait()
                readiness.cancel()
                await self._drain(self._times.drain_s if self._was_ready else self._times.unready_drain_s)
        except BaseExceptionGroup as errors:
            known = known_error(errors)
            if known is None:
                raise
            await self._drain(self._times.unready_drain_s)
            raise known from None
        finally:
            await self._kill_all()

    def request_stop(self) -> None:
        """Starts the drain: the coordinator first, then the workers."""
        self._stop.set()

    def kill_now(self) -> None:
        """Ends everything at once."""
        self.was_killed = True
        self._stop.set()
        for child in self._children:
            child.kill()

    def _on_line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        self._observer.line(spec, line, event)
        if event is None:
            return
        if event["event"] in READY_EVENTS:
            self._deaths[spec.name].clear()
            if spec.role != "coordinator":
                self._observer.loading(spec.name, 1.0)
        elif event["event"] == LOADING_EVENT and isinstance(event.get("fraction"), int | float):
            self._observer.loading(spec.name, min(1.0, max(0.0, float(event["fraction"]))))

    async def _start(self, child: ChildProcess) -> None:
        await child.start()
        layout = f", {child.spec.layout}" if child.spec.layout else ""
        self._observer.message(f"{child.spec.name}: started, pid {child.pid}{layout}")

    async def _keep(self, child: ChildProcess) -> None:
        while True:
            code = await child.wait()
            if self._stop.is_set():
                return
            delay_s = self._after_death(child, code)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)
                return
            await self._start(child)

    def _after_death(self, child: ChildProcess, code: int) -> float:
        what = f"{child.spec.name} {describe_exit(code)}"
        why = f": {child.last_error}" if child.last_error else ""
        if not self._was_ready:
            raise UnavailableError(f"{what} before the cluster was ready{why}", reason="CHILD_FAILED")
        now = time.monotonic()
        deaths = self._deaths[child.spec.name]
        deaths.append(now)
        delay_s = self._policy.delay_s(deaths, now)
        if delay_s is None:
            raise UnavailableError(f"{what} again and again{why}", reason="CRASH_LOOP")
        self._observer.message(f"{what}; starting it again in {delay_s:g} s{why}")
        return delay_s

    async def _watch_ready(self) -> None:
        try:
            async with asyncio.timeout(self._times.ready_s):
                model = await self._until_ready()
        except TimeoutError:
            message = f"the cluster was not ready within {self._times.ready_s:g} s"
            raise DeadlineExceededError(message, reason="NOT_READY") from None
        self._was_ready = True
        self._observer.ready(model)

    async def _until_ready(self) -> str:
        while True:
            with suppress(UnavailableError, DeadlineExceededError):
                model = await self._probe()
                if model is not None:
                    return model
            await asyncio.sleep(READY_POLL_S)

    async def _drain(self, drain_s: float) -> None:
        self._stop.set()
        deadline_s = drain_s + self._times.drain_margin_s
        front = [child for child in self._children if child.spec.role == "coordinator"]
        workers = [child for child in self._children if child.spec.role != "coordinator"]
        # The coordinator's running answers need the workers until they are finished.
        for stage in (front, workers):
            await self._end([child for child in stage if child.running], deadline_s)

    async def _end(self, children: Sequence[ChildProcess], deadline_s: float) -> None:
        if not children:
            return
        for child in children:
            child.terminate()
        ends = [asyncio.create_task(child.wait()) for child in children]
        await asyncio.wait(ends, timeout=deadline_s)
        for child in children:
            if child.running:
                self._observer.message(f"{child.spec.name}: did not end within {deadline_s:g} s, killed")
                child.kill()
        await asyncio.wait(ends)

    async def _kill_all(self) -> None:
        running = [child for child in self._children if child.running]
        for child in running:
            child.kill()
        for child in running:
            await asyncio.shield(child.wait())
