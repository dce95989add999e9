"""The supervisor of a local cluster: starts coordinator and workers, keeps them alive, drains them.

It knows processes, not what they serve: what to start comes as `ChildSpec`s, whether the whole is ready from a
probe, and what people see goes to an observer. Workers may be added and removed while it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from splitserve.child_process import ChildProcess, ChildSpec, Event, describe_exit
from splitserve.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
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


@dataclass(slots=True, eq=False)
class Member:
    """A child with what the supervisor knows of it."""

    child: ChildProcess
    elastic: bool = False
    """Added at run time: where it crashes again and again it is given up, not the cluster."""
    started_wall_s: float = 0.0
    """Its last start, seconds since the epoch."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to end and not to be started again."""
    deaths: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the child."""
        return self.child.spec.name


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
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = dict(environment or {})
        self._members = {spec.name: Member(self._child(spec)) for spec in specs}
        self._group: asyncio.TaskGroup | None = None
        self._probe = probe
        self._observer = observer
        self._times = times or ClusterTimes()
        self._policy = policy or RestartPolicy()
        self._stop = asyncio.Event()
        self.was_ready = asyncio.Event()
        self.was_killed = False

    @property
    def stopping(self) -> asyncio.Event:
        """Set once the cluster is to end."""
        return self._stop

    @property
    def members(self) -> list[Member]:
        """All children that are meant to run or have not ended yet."""
        return list(self._members.values())

    async def run(self) -> None:
        """Runs the cluster until `request_stop`; at the end no child is left, however it ended.

        Raises UnavailableError when a child dies before the cluster was ready (CHILD_FAILED) or again and again
        (CRASH_LOOP), with the child's last error in it, and DeadlineExceededError (NOT_READY).
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for member in self.members:
                    await self._start(member)
                    group.create_task(self._keep(member))
                readiness = group.create_task(self._watch_ready())
                await self._stop.wait()
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
            await self._kill_all()

    async def add(self, spec: ChildSpec) -> None:
        """Starts one more worker and keeps it alive. Its name must be free.

        Raises UnavailableError (STOPPING, START_FAILED) and FailedPreconditionError (NAME_TAKEN).
        """
        if self._group is None or self._stop.is_set():
            raise UnavailableError("the cluster does not run", reason="STOPPING")
        if spec.name in self._members:
            raise FailedPreconditionError(f"{spec.name} exists already", reason="NAME_TAKEN")
        member = Member(self._child(spec), elastic=True)
        self._members[spec.name] = member
        try:
            await self._start(member)
        except OSError as error:
            del self._members[spec.name]
            message = f"{spec.name} cannot be started: {error.strerror}"
            raise UnavailableError(message, reason="START_FAILED") from None
        except BaseException:
            del self._members[spec.name]
            raise
        self._group.create_task(self._keep(member))

    def remove(self, name: str, drain_s: float) -> None:
        """Lets a worker drain and end, and kills it after `drain_s` seconds. Returns at once; an unknown name is
        ignored, and so is a worker that is leaving already."""
        member = self._members.get(name)
        if self._group is None or member is None or member.leaving.is_set():
            return
        member.leaving.set()
        if member.child.running:
            self._observer.message(f"{name}: draining")
            self._group.create_task(self._end([member.child], drain_s + self._times.drain_margin_s))

    def request_stop(self) -> None:
        """Starts the drain: the coordinator first, then the workers."""
        self._stop.set()

    def kill_now(self) -> None:
        """Ends everything at once."""
        self.was_killed = True
        self._stop.set()
        for member in self.members:
            member.child.kill()

    def _child(self, spec: ChildSpec) -> ChildProcess:
        return ChildProcess(spec, self._on_line, self._environment)

    def _on_line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        self._observer.line(spec, line, event)
        if event is None:
            return
        if event["event"] in READY_EVENTS:
            if member := self._members.get(spec.name):
                member.deaths.clear()
            if spec.role != "coordinator":
                self._observer.loading(spec.name, 1.0)
        elif event["event"] == LOADING_EVENT and isinstance(event.get("fraction"), int | float):
            self._observer.loading(spec.name, min(1.0, max(0.0, float(event["fraction"]))))

    async def _start(self, member: Member) -> None:
        child = member.child
        await child.start()
        member.started_wall_s = time.time()
        layout = f", {child.spec.layout}" if child.spec.layout else ""
        self._observer.message(f"{child.spec.name}: started, pid {child.pid}{layout}")
        if member.leaving.is_set():
            child.terminate()  # it was told to leave while it was between two lives

    async def _keep(self, member: Member) -> None:
        """Starts a child again whenever it ends, until it shall end or, if it may, it is given up."""
        while True:
            code = await member.child.wait()
            if self._stop.is_set():
                return
            delay_s = None if member.leaving.is_set() else self._after_death(member, code)
            if delay_s is None or await self._told_to_end(member, delay_s):
                break
            await self._start(member)
        del self._members[member.name]
        if member.leaving.is_set():
            self._observer.message(f"{member.name}: ended")

    async def _told_to_end(self, member: Member, wait_s: float) -> bool:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stop, member.leaving)]
        try:
            done, _ = await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return bool(done)

    def _after_death(self, member: Member, code: int) -> float | None:
        """Seconds until the next start; None gives it up."""
        what = f"{member.name} {describe_exit(code)}"
        why = f": {member.child.last_error}" if member.child.last_error else ""
        if not self.was_ready.is_set():
            raise UnavailableError(f"{what} before the cluster was ready{why}", reason="CHILD_FAILED")
        now = time.monotonic()
        member.deaths.append(now)
        delay_s = self._policy.delay_s(member.deaths, now)
        if delay_s is None and member.elastic:
            self._observer.message(f"{what} again and again, given up{why}")
            return None
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
        self.was_ready.set()
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
        children = [member.child for member in self.members]
        front = [child for child in children if child.spec.role == "coordinator"]
        workers = [child for child in children if child.spec.role != "coordinator"]
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
        running = [member.child for member in self.members if member.child.running]
        for child in running:
            child.kill()
        for child in running:
            await asyncio.shield(child.wait())
