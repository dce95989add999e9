"""What joins engine and transport on the engine thread, whichever of its sides a worker takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.core.engine import Engine
from engine.worker.engine_thread import StepListener
from engine.worker.status import WorkerStatus
from kv_transfer.transports.poll_dealer import PollDealer
from kv_transfer.transports.transport import TransferEndpoint, Transport


class KvConnector(StepListener, ABC):
    """Joins engine and transport on the engine thread; see `engine.worker.engine_thread.StepListener`."""

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

    @property
    def status(self) -> WorkerStatus:
        """The latest status, for any thread. Read it once if several fields must be consistent."""
        return self._status

    def before_step(self, core: Engine, now: float) -> bool:
        """See `StepListener`. The one place where a worker's transport is polled each time."""
        self.polls.poll()
        return self.advance(core, now)

    @abstractmethod
    def advance(self, core: Engine, now: float) -> bool:
        """Handles what the last poll has brought, and what is due; returns what `before_step` does."""

    def close(self) -> None:
        """Closes the transport; called last."""
        self._transport.close()

    def _publish(self, status: WorkerStatus) -> None:
        before, self._status = self._status, status
        if before.in_progress and not status.in_progress:
            self._on_idle()
