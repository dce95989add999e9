"""Whom a golden prompt is sent to: the workers of its target, a neutral one alone included."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.quality import prober
from coordinator.quality.prober import GoldenPrompt, WorkerProber
from coordinator.quality.target import targets_of
from coordinator.request.observer import RequestEvents
from coordinator.workers.clients import WorkerClients
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import UnavailableError
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)


async def test_the_only_neutral_worker_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, background = Registry(5.0), BackgroundTasks()
    request = registration("n", registry_pb2.POOL_PREFILL)
    request.neutral = True
    worker = registry.register(request, 0.0)
    registry.set_output_open(worker.key, True)
    worker = registry.report(registry_pb2.ReportRequest(worker_id="n", epoch=1), 0.0)
    asked: list[tuple[WorkerKey, ...]] = []

    class Asked:
        """In place of an attempt: notes its workers, and goes no further."""

        def __init__(self, events: RequestEvents, *_: Any) -> None:
            record = events.state.attempt
            assert record.decode is not None
            asked.append((record.prefill.key, record.decode.key))
            raise UnavailableError("noted", reason="NOTED")

    monkeypatch.setattr(prober, "Attempt", Asked)
    clients = WorkerClients(registry, background, "c", 2**20)
    monkeypatch.setattr(clients, "client_for", lambda worker: worker)
    (target,) = targets_of(registry.snapshot(), "words")
    with pytest.raises(UnavailableError, match="noted"):
        await WorkerProber(registry, clients, background).ask(target, GoldenPrompt(0, worker.model, (1, 2)))
    assert asked == [(worker.key, worker.key)]
    await background.close(1.0)
