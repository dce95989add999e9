"""Roles in the registry: which pools a worker is in, what happens when its role changes, and who asks it to."""

from __future__ import annotations

import pytest

from coordinator.health.circuit_breakers import circuit_statuses
from coordinator.telemetry.prometheus import coordinator_metrics
from coordinator.workers.registration import check_report
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import checked_plan
from coordinator.workers.snapshot import Worker
from splitserve.errors import InvalidArgumentError
from splitserve.roles import RoleName
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE, BOTH = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_BOTH
Role = registry_pb2.Role.ValueType


def changing(name: str, role: Role) -> registry_pb2.RegisterRequest:
    """A worker that takes other roles."""
    request = registration(name, role)
    request.changes_role = True
    return request


def report(name: str, registry: Registry, **fields: object) -> registry_pb2.ReportRequest:
    """With lanes to all that the worker is told of."""
    worker = found(registry, name)
    peers = [endpoint.agent_id for endpoint in registry.peers_of(worker)]
    return registry_pb2.ReportRequest(worker_id=name, epoch=1, connected_agent_ids=peers, **fields)  # type: ignore[arg-type]


def found(registry: Registry, name: str) -> Worker:
    worker = registry.get((name, 1))
    assert worker is not None
    return worker


def cluster(**roles: Role) -> Registry:
    registry = Registry(5.0)
    for name, role in roles.items():
        registry.register(changing(name, role), 0.0)
    for name in roles:
        registry.set_output_open((name, 1), True)
    for _ in range(2):
        for name in roles:
            registry.report(report(name, registry), 1.0)
    return registry


def ready(registry: Registry) -> list[str]:
    snapshot = registry.snapshot()
    return [worker.worker_id for worker in snapshot.workers if snapshot.is_ready(worker)]


def agents(registry: Registry, name: str) -> set[str]:
    """The names of the workers to which one writes."""
    names = {worker.agent_id: worker.worker_id for worker in registry.snapshot().workers}
    return {names[peer.agent_id] for peer in registry.peers_of(found(registry, name))}


def test_workers_write_to_all_that_decode_but_themselves_and_those_hear_of_ended_writers() -> None:
    registry = Registry(5.0)
    for name, role in (("w0", BOTH), ("w1", BOTH), ("p", PREFILL), ("d", DECODE)):
        registry.register(registration(name, role), 0.0)
    assert agents(registry, "w0") == {"d", "w1"}
    assert agents(registry, "w1") == {"d", "w0"}
    assert agents(registry, "p") == {"d", "w0", "w1"}
    assert agents(registry, "d") == set()
    registry.mark_ended(found(registry, "p"))
    told = [name for name in ("d", "p", "w0", "w1") if registry.ended_writers_for(found(registry, name))]
    assert told == ["d", "w0", "w1"]


def test_one_of_role_both_serves_alone() -> None:
    registry = cluster(w0=BOTH)
    assert ready(registry) == ["w0"]
    assert registry.snapshot().ready_models() == {"words"}
    assert registry.snapshot().state_of(found(registry, "w0")) == scaling_pb2.WORKER_STATE_READY


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_one_of_another_role_serves_nobody_alone(role: Role) -> None:
    assert ready(cluster(w0=role)) == []


def test_without_its_output_stream_it_serves_nobody() -> None:
    registry = cluster(w0=BOTH)
    registry.set_output_open(("w0", 1), False)
    assert ready(registry) == []


def test_one_of_role_both_is_a_peer_of_others() -> None:
    registry = cluster(w0=BOTH)
    registry.register(registration("d", DECODE), 0.0)
    registry.set_output_open(("d", 1), True)
    registry.report(report("d", registry), 1.0)
    registry.report(report("w0", registry), 1.0)
    assert ready(registry) == ["d", "w0"]


def test_one_of_role_both_joins_once_its_lanes_are_up_in_both_directions() -> None:
    registry = cluster(w0=BOTH)
    registry.register(registration("w1", BOTH), 0.0)
    registry.set_output_open(("w1", 1), True)
    registry.report(report("w1", registry), 1.0)
    assert not found(registry, "w1").joined
    registry.report(report("w0", registry), 1.0)
    assert found(registry, "w1").joined


def test_a_change_of_role_is_one_of_the_version_and_keeps_what_was_sent() -> None:
    registry = cluster(w0=PREFILL, w1=DECODE)
    before = registry.version
    registry.loads.count_stream(("w1", 1), 40)
    registry.report(report("w1", registry, role=BOTH), 2.0)
    assert found(registry, "w1").role == "both"
    assert registry.version > before
    assert ready(registry) == ["w0", "w1"]
    registry.loads.count_stream(("w1", 1), 20)
    registry.loads.count_prompt(("w1", 1), 30)
    assert registry.loads.decode["w1", 1].sent_tokens == 20  # 40 are part of the report
    assert registry.loads.prefill["w1", 1].sent_tokens == 30


def test_lanes_and_streams_of_an_earlier_role_stay() -> None:
    """Requests under way go on after a change: prompts are written, tokens are streamed."""
    registry = cluster(w0=PREFILL, w1=DECODE, d=DECODE)
    registry.report(report("w0", registry, role=DECODE), 2.0)
    registry.report(report("w1", registry, role=PREFILL), 2.0)
    assert agents(registry, "w0") == {"w1", "d"}
    assert agents(registry, "w1") == {"w0", "d"}
    w0, w1 = found(registry, "w0"), found(registry, "w1")
    assert (w0.computes_prompts, w0.sends_kv, w0.decodes, w0.takes_kv) == (False, True, True, True)
    assert (w1.computes_prompts, w1.sends_kv, w1.decodes, w1.takes_kv) == (True, True, False, True)
    snapshot = registry.snapshot()
    assert [w.worker_id for w in snapshot.accepting("words", "prefill")] == ["w1"]
    assert [w.worker_id for w in snapshot.accepting("words", "decode")] == ["d", "w0"]


def test_a_report_without_a_role_changes_nothing() -> None:
    registry = cluster(w0=DECODE)
    registry.report(report("w0", registry, role=PREFILL), 2.0)
    registry.report(report("w0", registry), 3.0)
    assert found(registry, "w0").role == "prefill"


def test_a_role_that_does_not_exist_is_refused() -> None:
    registry = cluster(d=DECODE)
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(report("d", registry, role=7))
    assert caught.value.field == "role"
    with pytest.raises(InvalidArgumentError) as caught:
        registry.register(registration("x", registry_pb2.ROLE_UNSPECIFIED), 0.0)
    assert caught.value.field == "role"


def test_never_all_of_a_pool_are_ejected() -> None:
    class Open:
        admits, state = False, "open"

    registry = cluster(w0=BOTH, w1=BOTH)
    found_open = circuit_statuses(registry.snapshot(), {(("w0", 1),): Open()})  # type: ignore[dict-item]
    assert found_open["w0", 1].tripped
    both = {((name, 1),): Open() for name in ("w0", "w1")}
    statuses = circuit_statuses(registry.snapshot(), both)  # type: ignore[arg-type]
    assert not all(status.tripped for status in statuses.values())


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ({"w0": BOTH}, (1, 1)),
        ({"w0": BOTH, "w1": BOTH}, (2, 2)),
        ({"w0": DECODE, "w1": PREFILL, "w2": DECODE}, (1, 2)),
        ({"w0": DECODE, "w1": BOTH}, (1, 2)),
        ({}, (0, 0)),
    ],
)
def test_a_worker_of_role_both_counts_in_both_pools(
    roles: dict[str, Role], expected: tuple[int, int]
) -> None:
    metrics = {one.name: one for one in coordinator_metrics(cluster(**roles).snapshot(), 0, {})}
    counts = {one.labels["pool"]: one.value for one in metrics["splitserve_ready_workers"].samples}
    assert (counts["prefill"], counts["decode"]) == expected


def plan_of(*roles: tuple[str, int]) -> scaling_pb2.ApplyPlanRequest:
    request = scaling_pb2.ApplyPlanRequest()
    for name, role in roles:
        request.roles.add(worker_id=name, role=role)  # type: ignore[arg-type]
    return request


def test_a_plan_that_names_roles_is_passed_on_while_it_is_in_force() -> None:
    registry = cluster(w0=PREFILL, w1=DECODE)
    registry.register(registration("d", DECODE), 0.0)

    def asked() -> list[RoleName | None]:
        return [registry.plan.role_change_of(found(registry, name)) for name in ("w0", "w1", "d")]

    registry.apply_plan(checked_plan(plan_of(("w0", DECODE), ("w1", DECODE), ("d", PREFILL)), 0.0))
    assert asked() == ["decode", None, None], "w1 has it, d takes no other role"
    registry.report(report("w0", registry, role=DECODE), 2.0)
    assert asked() == [None, None, None]
    registry.apply_plan(checked_plan(plan_of(("w0", BOTH)), 3.0))
    assert asked() == ["both", None, None]
    registry.expire(34.0, absent_s=31.0)
    assert asked() == [None, None, None]


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        ([("w0", DECODE), ("w0", PREFILL)], "roles.worker_id"),
        ([("w0", registry_pb2.ROLE_UNSPECIFIED)], "roles.role"),
        ([("w0", 9)], "roles.role"),
    ],
)
def test_a_plan_gives_a_worker_one_known_role(roles: list[tuple[str, int]], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_plan(plan_of(*roles), 0.0)
    assert caught.value.field == field
