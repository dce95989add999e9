"""Connectors join engine and transport on the engine thread, and publish the worker's status for other threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from typing_extensions import override

from engine.core.engine import Engine, EngineLoad, StepResult
from kv_transfer.lanes import JudgedLane, LaneKind
from kv_transfer.transports.polling import PollDealer
from kv_transfer.transports.transport import TransferEndpoint, Transport
from worker.build import EngineParts

WriteOutcome = Literal["completed", "failed"]
Writes = Mapping[tuple[LaneKind, WriteOutcome], int]
"""Handoffs that a worker has written to others since its start, by lane and outcome."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker at one moment. Created on the engine thread around each step; any thread may read it."""

    load: EngineLoad = field(default_factory=EngineLoad)
    in_progress: int = 0
    """What a drain waits for: pushes in flight, and requests where they are decoded."""
    transfers_in_flight: int = 0
    waiting_reservations: int = 0
    lanes: tuple[JudgedLane, ...] = ()
    usable_agents: frozenset[str] = frozenset()
    """Agent ids of the peers that this worker may write to: connected, measured, not refused."""
    handoffs_completed: int = 0
    handoff_bytes: int = 0
    handoffs_rejected: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Handoffs that failed or were refused, by reason."""
    completions_rejected: int = 0
    """How many of the rejected handoffs this worker was to receive."""
    writes: Writes | None = None
    """None for a worker that writes to nobody."""


class KvConnector(ABC):
    """Joins engine and transport on the engine thread, between steps: polls the transport, sends the outputs on."""

    def __init__(
        self, endpoint: TransferEndpoint, transport: Transport, polls: PollDealer, on_idle: Callable[[], None]
    ) -> None:
        """`polls` polls the transport, and keeps what each side is to take. `on_idle` is called on the engine thread
        when nothing is in progress any more; see `WorkerStatus.in_progress`."""
        self.endpoint = endpoint
        self.polls = polls
        self._transport = transport
        self._on_idle = on_idle
        self._status = WorkerStatus()

    @property
    def status(self) -> WorkerStatus:
        """The latest status, for any thread. Read it once if several fields must be consistent."""
        return self._status

    def before_step(self, core: Engine, now: float) -> bool:
        """Polls the transport and handles what has arrived. Returns whether to call it again within the poll interval
        even if the engine is idle."""
        self.polls.poll()
        return self.advance(core, now)

    @abstractmethod
    def advance(self, core: Engine, now: float) -> bool:
        """Handles what the last poll has brought, and what is due; returns what `before_step` does."""

    @abstractmethod
    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """Handles the result of a step that ended at `now`.

        The next step may already have begun; see `Engine` for what may not be called then.
        """

    def close(self) -> None:
        """Closes the transport; called last."""
        self._transport.close()

    def _publish(self, status: WorkerStatus) -> None:
        before, self._status = self._status, status
        if before.in_progress and not status.in_progress:
            self._on_idle()


class PairedConnector(KvConnector):
    """A sender and a receiver of KV that share engine, transport and polls. All methods run on the engine thread.

    Each side knows the ids of its own requests, which differ (`prefill_worker.kv_producer.engine_id`), and ignores all
    others in a step's result. A side that raises an error for a request ends that request itself.
    """

    def __init__(
        self, parts: EngineParts, sender: KvConnector, receiver: KvConnector, on_idle: Callable[[], None]
    ) -> None:
        """`receiver` takes its notifications from the polls of `sender`."""
        super().__init__(parts.endpoint, parts.transport, sender.polls, on_idle)
        self.sender = sender
        self.receiver = receiver

    @property
    @override
    def status(self) -> WorkerStatus:
        return merged(self.sender.status, self.receiver.status)

    @override
    def advance(self, core: Engine, now: float) -> bool:
        """Advances the sender first: writes that have ended free blocks that waiting reservations may take."""
        writing = self.sender.advance(core, now)
        return self.receiver.advance(core, now) or writing

    @override
    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """Sends the streams' tokens first: a write may be a copy by this thread."""
        self.receiver.after_step(core, result, now)
        self.sender.after_step(core, result, now)


def merged(sent: WorkerStatus, received: WorkerStatus) -> WorkerStatus:
    """The status of a worker that sends KV and receives it. The load is that of `received`, which is read later."""
    rejected = Counter(received.handoffs_rejected)
    rejected.update(sent.handoffs_rejected)
    return replace(
        received,
        in_progress=sent.in_progress + received.in_progress,
        transfers_in_flight=sent.transfers_in_flight + received.transfers_in_flight,
        lanes=sent.lanes,
        usable_agents=sent.usable_agents,
        handoffs_completed=sent.handoffs_completed + received.handoffs_completed,
        handoff_bytes=sent.handoff_bytes,
        handoffs_rejected=rejected,
        writes=sent.writes,
    )
