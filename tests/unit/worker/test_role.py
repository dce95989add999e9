"""The role of a worker on the event loop: what it refuses, how it follows orders, what it shows, room for prompts."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.service import DecodeService
from kv_transfer.transports.transport import TransferEndpoint
from prefill_worker.service import PrefillService
from splitserve.config.worker import WorkerConfig
from splitserve.errors import UnavailableError
from splitserve.v1 import registry_pb2
from tests.support.roles.both_rig import BothRig
from worker import role as role_module
from worker.connector import WorkerStatus, merged
from worker.process import WorkerProcess
from worker.role import Role

PREFILL, DECODE, BOTH = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_BOTH
STAGES = {"model": "any-folder", "engine": {"kind": "vllm", "engine_args": "-pp 2"}}

pytestmark = pytest.mark.timeout(60)


def config_of(**settings: Any) -> WorkerConfig:
    return WorkerConfig.model_validate({"worker_id": "w", "model": "simulated"} | settings)


def worker_of(**settings: Any) -> WorkerProcess:
    return WorkerProcess(config_of(**settings), [PrefillService, DecodeService])


def shown(role: Role) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for metric in role.metrics()
        for sample in metric.samples
    }


def test_new_requests_of_another_pool_are_refused() -> None:
    of_both, prefill = (Role(config_of(role=name), lambda: None) for name in ("both", "prefill"))
    of_both.require("prefill")
    of_both.require("decode")
    prefill.require("prefill")
    with pytest.raises(UnavailableError) as refused:
        prefill.require("decode")
    assert refused.value.reason == "WRONG_ROLE"


async def test_a_change_is_reported_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(role="decode")
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(
        role_module, "log_event", lambda event, **fields: events.append({"event": event, **fields})
    )
    reports = 0

    def report_soon() -> None:
        nonlocal reports
        reports += 1

    monkeypatch.setattr(worker, "report_soon", report_soon)
    for number in (DECODE, PREFILL, PREFILL, 99, 98, BOTH, PREFILL):
        worker.role.follow("c:1", number)  # type: ignore[arg-type]
    assert worker.role.name == "prefill"
    assert reports == 3
    assert [(e["from"], e["to"]) for e in events if e["event"] == "worker.role_changed"] == [
        ("decode", "prefill"),
        ("prefill", "both"),
        ("both", "prefill"),
    ]
    assert [event["role"] for event in events if event["event"] == "worker.role_refused"] == [99]
    assert shown(worker.role) == {
        ("splitserve_worker_role", "prefill"): 1,
        ("splitserve_worker_role", "decode"): 0,
        ("splitserve_worker_role", "both"): 0,
        ("splitserve_worker_role_changes_total", ""): 3,
    }


def test_a_pipeline_of_vllm_keeps_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(role_module, "log_event", lambda event, **_: events.append(event))
    role = Role(config_of(role="prefill", **STAGES), lambda: pytest.fail("it has changed"))
    role.follow("c:1", PREFILL)
    assert events == []
    for number in (DECODE, BOTH):
        role.follow("c:1", number)
    assert (role.name, role.may_change, events) == ("prefill", False, ["worker.role_refused"])


async def test_reservations_leave_room_while_prompts_may_come_or_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers that swap their roles would else wait for each other's blocks."""
    worker, busy = worker_of(role="prefill"), True
    said: list[bool] = []

    class Core:
        def keep_prompt_room(self, keeps: bool) -> None:
            said.append(keeps)

    monkeypatch.setattr(worker.engine, "post", lambda fn: fn(Core()))
    monkeypatch.setattr(PrefillService, "busy", lambda _: busy)
    worker.role.follow("c:1", DECODE)
    assert said == [], "its prompts are not computed yet"
    busy = False
    worker.service_idle()
    assert said == [False]
    worker.role.follow("c:1", BOTH)
    assert said == [False, True]


async def test_a_worker_is_no_peer_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, rig = worker_of(), BothRig()
    services = PrefillService(worker)
    services.producer = rig.a.producer
    posted: list[Any] = []
    monkeypatch.setattr(worker.engine, "post", posted.append)
    ends: list[TransferEndpoint] = [rig.a.connector.endpoint, rig.b.connector.endpoint]
    services.on_peers("c:1", ends)
    assert services._wanted().keys() == {ends[1].agent_id}
    assert len(posted) == 1


def test_the_status_is_of_both_sides() -> None:
    sent = WorkerStatus(
        in_progress=2,
        transfers_in_flight=3,
        usable_agents=frozenset({"x"}),
        handoffs_completed=4,
        handoff_bytes=5,
        handoffs_rejected={"PEER_LOST": 1, "stale_epoch": 1},
        writes={("rdma", "completed"): 4},
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
    assert (both.usable_agents, both.writes) == (frozenset({"x"}), {("rdma", "completed"): 4})
