"""The role of a neutral worker on the event loop: where it leans, whom it takes for peers, what it shows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.worker.process import WorkerProcess
from engine.worker.status import HandoffWrites, WorkerStatus
from kv_transfer.transports.transport import TransferEndpoint
from neutral_worker import service
from neutral_worker.leaning import Leaning
from neutral_worker.neutral_connector import NeutralConnector, merged
from neutral_worker.service import NeutralRole
from splitserve.config.worker import WorkerConfig
from splitserve.v1 import registry_pb2
from tests.support.neutral.neutral_rig import NeutralRig

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE

pytestmark = pytest.mark.timeout(60)


def role_of(worker_id: str = "w", **settings: Any) -> tuple[WorkerProcess[NeutralConnector], NeutralRole]:
    made: list[NeutralRole] = []

    def make(worker: WorkerProcess[NeutralConnector]) -> NeutralRole:
        made.append(NeutralRole(worker))
        return made[0]

    return WorkerProcess(WorkerConfig(worker_id=worker_id, model="simulated", **settings), make), made[0]


def shown(role: NeutralRole) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("pool", "")): sample.value
        for metric in role.metrics()
        for sample in metric.samples
    }


def test_leaning_is_followed_and_counted() -> None:
    leaning = Leaning("decode")
    assert (leaning.pool, leaning.name) == (DECODE, "decode")
    assert not leaning.follow(DECODE)
    assert leaning.follow(PREFILL)
    assert not leaning.follow(99)  # type: ignore[arg-type]
    assert (leaning.name, leaning.changes) == ("prefill", 1)


async def test_a_change_is_reported_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, role = role_of(leaning="decode")
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(
        service, "log_event", lambda event, **fields: events.append({"event": event, **fields})
    )
    reports = 0

    def report_soon() -> None:
        nonlocal reports
        reports += 1

    monkeypatch.setattr(worker, "report_soon", report_soon)
    for pool in (DECODE, PREFILL, PREFILL, 99, 98, DECODE, PREFILL):
        role.on_leaning("c:1", pool)  # type: ignore[arg-type]
    assert role.pool == PREFILL
    assert reports == 3
    assert [(e["from"], e["to"]) for e in events if e["event"] == "worker.leaning"] == [
        ("decode", "prefill"),
        ("prefill", "decode"),
        ("decode", "prefill"),
    ]
    assert [event["leaning"] for event in events if event["event"] == "worker.leaning_unknown"] == [99]
    assert shown(role) == {
        ("splitserve_leaning", "prefill"): 1,
        ("splitserve_leaning", "decode"): 0,
        ("splitserve_leaning_changes_total", ""): 3,
    }


async def test_a_worker_is_no_peer_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _, role = role_of()
    rig = NeutralRig()
    monkeypatch.setattr(WorkerProcess, "connector", property(lambda _: rig.a.connector))
    told: list[list[TransferEndpoint]] = []
    monkeypatch.setattr(role._prefill, "on_peers", lambda _, peers: told.append(peers))
    ends = [rig.a.connector.endpoint, rig.b.connector.endpoint]
    role.on_peers("c:1", ends)
    assert told == [ends[1:]]


async def test_its_settings_name_the_first_leaning() -> None:
    _, role = role_of()
    assert role.pool == PREFILL
    assert (role.neutral, role.certificate) == (True, "worker")
    await asyncio.sleep(0)


def test_the_status_is_of_both_parts() -> None:
    sent = WorkerStatus(
        in_progress=2,
        transfers_in_flight=3,
        usable_agents=frozenset({"x"}),
        handoffs_completed=4,
        handoff_bytes=5,
        handoffs_rejected={"PEER_LOST": 1, "stale_epoch": 1},
        writes=HandoffWrites(),
    )
    received = WorkerStatus(
        in_progress=10,
        transfers_in_flight=20,
        waiting_reservations=30,
        handoffs_completed=40,
        handoffs_rejected={"stale_epoch": 2, "duplicate": 0},
    )
    both = merged(sent, received)
    assert (both.in_progress, both.transfers_in_flight, both.waiting_reservations) == (12, 23, 30)
    assert (both.handoffs_completed, both.handoff_bytes) == (44, 5)
    assert dict(both.handoffs_rejected) == {"PEER_LOST": 1, "stale_epoch": 3, "duplicate": 0}
    assert (both.usable_agents, both.writes) == (frozenset({"x"}), HandoffWrites())
