"""What a prefill or decode role has of a worker process whose connector has both parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from engine.core.engine import Engine
from engine.worker.build import EngineParts
from engine.worker.engine_thread import EngineThread, KvConnector
from engine.worker.process import WorkerProcess
from engine.worker.role import EngineCalls
from splitserve.tracing.finished_span import SpanSink

W = TypeVar("W", bound=KvConnector)
P = TypeVar("P", bound=KvConnector)
T = TypeVar("T")


class PartCalls(Generic[W, P]):
    """Calls into an engine thread whose connector is made of several, for one of these."""

    def __init__(self, engine: EngineThread[W], part: Callable[[W], P]) -> None:
        self._engine = engine
        self._part = part

    async def call(self, fn: Callable[[Engine, P], T]) -> T:
        """See `EngineThread.call`."""
        return await self._engine.call(lambda core, whole: fn(core, self._part(whole)))

    def post(self, fn: Callable[[Engine, P], object]) -> None:
        """See `EngineThread.post`."""
        self._engine.post(lambda core, whole: fn(core, self._part(whole)))


class WorkerPart(Generic[W, P]):
    """A worker process as one of its roles sees it; see `WorkerHost`."""

    def __init__(self, worker: WorkerProcess[W], part: Callable[[W], P]) -> None:
        self.config = worker.config
        self._worker = worker
        self._part = part
        self._calls = PartCalls(worker.engine, part)

    @property
    def epoch(self) -> int:
        """This boot's number."""
        return self._worker.epoch

    @property
    def spans(self) -> SpanSink | None:
        """Takes the spans of traced requests; None: they are not exported."""
        return self._worker.spans

    @property
    def engine(self) -> EngineCalls[P]:
        """The engine thread."""
        return self._calls

    @property
    def parts(self) -> EngineParts:
        """The engine's parts, once it is built."""
        return self._worker.parts

    @property
    def connector(self) -> P:
        """The role's connector, once the engine is built."""
        return self._part(self._worker.connector)

    def require_accepting(self) -> None:
        """See `WorkerProcess.require_accepting`."""
        self._worker.require_accepting()

    def service_idle(self) -> None:
        """See `WorkerProcess.service_idle`."""
        self._worker.service_idle()

    def ticket_rejected(self) -> None:
        """See `WorkerProcess.ticket_rejected`."""
        self._worker.ticket_rejected()

    def report_now(self) -> None:
        """See `WorkerProcess.report_now`."""
        self._worker.report_now()
