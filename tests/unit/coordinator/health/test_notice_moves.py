"""What a worker has not finished shortly before its machine's end leaves it, if others can take it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.health.notice_moves import MARGIN_S, NoticeMover
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import SplitserveError
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration

NOW = 100.0


class FailingClients:
    """Takes note of whose attempts are failed, and why."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []

    def client_for(self, worker: Worker) -> Any:
        clients = self

        class Client:
            def fail_all(self, error: SplitserveError) -> None:
                clients.failed.append((worker.worker_id, error.reason))

        return Client()


class Rig:
    """A prefill worker and `decode` decode workers."""

    def __init__(self, decode: int = 2) -> None:
        self.registry = Registry(1000.0)
        self.registry.register(registration("p0", registry_pb2.ROLE_PREFILL), NOW)
        self.decode = 0
        self._agents: list[str] = []
        for _ in range(decode):
            self.add_decode()
        self.clients = FailingClients()
        clients: Any = self.clients
        self.mover = NoticeMover(self.registry, clients)

    def add_decode(self) -> None:
        made = self.registry.register(registration(f"d{self.decode}", registry_pb2.ROLE_DECODE), NOW)
        self.decode += 1
        self._agents.append(made.agent_id)
        self.report(made.worker_id)
        self.registry.set_output_open(made.key, True)
        self.report("p0", connected_agent_ids=self._agents)

    def report(self, name: str, left_s: float | None = None, **fields: Any) -> None:
        message = registry_pb2.ReportRequest(worker_id=name, epoch=1, **fields)
        if left_s is not None:
            message.preemption.time_left.FromNanoseconds(round(left_s * 1e9))
        self.registry.report(message, NOW)


def test_without_a_notice_nothing_moves() -> None:
    rig = Rig()
    assert not rig.mover.look(NOW)
    assert rig.clients.failed == []


def test_all_leave_once_the_end_is_near() -> None:
    rig = Rig()
    rig.report("d0", 10.0 + MARGIN_S)
    assert rig.mover.look(NOW + 9.9)
    assert rig.clients.failed == []
    for _ in range(3):
        assert rig.mover.look(NOW + 10.1)
    assert rig.clients.failed == [("d0", "WORKER_PREEMPTED")]


def test_prompts_leave_a_prefill_worker() -> None:
    rig = Rig()
    rig.registry.register(registration("p1", registry_pb2.ROLE_PREFILL), NOW)
    rig.report("p1", connected_agent_ids=rig._agents)
    rig.report("p0", 1.0)
    rig.mover.look(NOW)
    assert rig.clients.failed == [("p0", "WORKER_PREEMPTED")]


def test_nothing_moves_while_there_is_nowhere_to_go(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(decode=1)
    rig.report("d0", 1.0)
    with caplog.at_level("INFO"):
        assert rig.mover.look(NOW)
        assert rig.mover.look(NOW + 20.0)
    assert rig.clients.failed == []
    assert sum("notice.stuck" in record.message for record in caplog.records) == 1
    rig.add_decode()
    rig.mover.look(NOW + 20.1)
    assert rig.clients.failed == [("d0", "WORKER_PREEMPTED")]
