"""Both sides of the handoff on one engine thread: it polls once, and each part takes what is its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from decode_worker.kv_consumer import KvConsumer
from engine.core.engine import Engine
from engine.core.types import StepResult
from engine.worker.build import EngineParts
from engine.worker.engine_thread import KvConnector
from engine.worker.status import WorkerStatus
from prefill_worker.kv_producer import KvProducer


class NeutralConnector(KvConnector):
    """A producer and a consumer that share engine, transport and polls. All methods run on the engine thread.

    Each part knows the ids of its own requests, which differ (`prefill_worker.live_prefill.engine_id`), and ignores all
    others in a step's result. What one of them raises for a request, it ends there.
    """

    def __init__(
        self, parts: EngineParts, producer: KvProducer, consumer: KvConsumer, on_idle: Callable[[], None]
    ) -> None:
        """`consumer` takes its notifications from the polls of `producer`."""
        super().__init__(parts.endpoint, parts.transport, producer.polls, on_idle)
        self.producer = producer
        self.consumer = consumer

    @property
    def status(self) -> WorkerStatus:
        """Both parts' latest status in one."""
        return merged(self.producer.status, self.consumer.status)

    def fall_asleep(self) -> None:
        """See `KvConnector`. Both parts have the same transport."""
        self.producer.fall_asleep()
        self.consumer.fall_asleep()
        super().fall_asleep()

    def advance(self, core: Engine, now: float) -> bool:
        """See `KvConnector`. First what was written, since it frees blocks that waiting reservations may take."""
        writing = self.producer.advance(core, now)
        return self.consumer.advance(core, now) or writing

    def after_step(self, core: Engine, result: StepResult, now: float) -> None:
        """See `StepListener`. First the streams' tokens: a write may be a copy by this thread."""
        self.consumer.after_step(core, result, now)
        self.producer.after_step(core, result, now)


def merged(sent: WorkerStatus, received: WorkerStatus) -> WorkerStatus:
    """The status of a worker that sends KV and receives it. The load is the one of `received`, the later one."""
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
