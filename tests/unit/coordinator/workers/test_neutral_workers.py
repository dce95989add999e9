"""Neutral workers in the registry: what they are of both pools, and where they lean."""

from __future__ import annotations

import pytest

from coordinator.health.breaker_registry import circuit_statuses
from coordinator.metrics.prometheus import coordinator_metrics
from coordinator.quality.target import targets_of
from coordinator.workers.registration import check_report
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import checked_plan
from coordinator.workers.snapshot import PoolName, Worker
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE


def neutral(name: str, pool: registry_pb2.Pool.ValueType) -> registry_pb2.RegisterRequest:
    request = registration(name, pool)
    request.neutral = True
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


def cluster(**leanings: registry_pb2.Pool.ValueType) -> Registry:
    registry = Registry(5.0)
    for name, pool in leanings.items():
        registry.register(neutral(name, pool), 0.0)
    for name in leanings:
        registry.set_output_open((name, 1), True)
    for _ in range(2):
        for name in leanings:
            registry.report(report(name, registry), 1.0)
    return registry


def ready(registry: Registry) -> list[str]:
    snapshot = registry.snapshot()
    return [worker.worker_id for worker in snapshot.workers if snapshot.is_ready(worker)]


def test_they_write_to_all_that_decode_but_themselves_and_hear_of_ended_writers() -> None:
    registry = Registry(5.0)
    for request in (neutral("w0", PREFILL), neutral("w1", DECODE), registration("p", PREFILL)):
        registry.register(request, 0.0)
    registry.register(registration("d", DECODE), 0.0)
    agents = {worker.worker_id: worker.agent_id for worker in registry.snapshot().workers}
    peers = {name: [peer.agent_id for peer in registry.peers_of(found(registry, name))] for name in agents}
    assert peers["w0"] == [agents["d"], agents["w1"]]
    assert peers["w1"] == [agents["d"], agents["w0"]]
    assert peers["p"] == [agents["d"], agents["w0"], agents["w1"]]
    assert peers["d"] == []
    registry.mark_ended(found(registry, "p"))
    told = [name for name in agents if registry.ended_writers_for(found(registry, name))]
    assert sorted(told) == ["d", "w0", "w1"]


def test_one_alone_serves_whatever_it_leans_to() -> None:
    for pool in (PREFILL, DECODE):
        registry = cluster(w0=pool)
        assert ready(registry) == ["w0"]
        assert registry.snapshot().ready_models() == {"words"}
        assert registry.snapshot().state_of(found(registry, "w0")) == scaling_pb2.WORKER_STATE_READY


def test_without_its_output_stream_it_serves_nobody() -> None:
    registry = cluster(w0=PREFILL)
    registry.set_output_open(("w0", 1), False)
    assert ready(registry) == []


def test_a_neutral_worker_is_a_peer_of_pinned_ones() -> None:
    registry = cluster(w0=PREFILL)
    registry.register(registration("d", DECODE), 0.0)
    registry.set_output_open(("d", 1), True)
    registry.report(report("d", registry), 1.0)
    registry.report(report("w0", registry), 1.0)
    assert ready(registry) == ["d", "w0"]


def test_a_neutral_worker_joins_once_its_lanes_are_up_in_both_directions() -> None:
    registry = cluster(w0=PREFILL)
    registry.register(neutral("w1", DECODE), 0.0)
    registry.set_output_open(("w1", 1), True)
    registry.report(report("w1", registry), 1.0)
    assert not found(registry, "w1").joined
    registry.report(report("w0", registry), 1.0)
    assert found(registry, "w1").joined


def test_a_change_of_leaning_is_one_of_the_version_and_keeps_what_was_sent() -> None:
    registry = cluster(w0=PREFILL, w1=DECODE)
    before = registry.version
    registry.loads.count_stream(("w1", 1), 40)
    expected = registry.loads.expect(("w1", 1), 30)
    registry.report(report("w1", registry, leaning=PREFILL), 2.0)
    assert found(registry, "w1").pool == "prefill"
    assert registry.version > before
    assert ready(registry) == ["w0", "w1"]
    registry.loads.count_stream(("w1", 1), 20)
    assert expected is not None
    expected.begin()
    assert registry.loads.decode["w1", 1].sent_tokens == 20  # 40 are part of the report
    assert registry.loads.prefill["w1", 1].sent_tokens == 30
    assert registry.loads.prefill["w1", 1].expected_tokens == 0


def test_a_report_without_a_leaning_says_the_registered_one() -> None:
    registry = cluster(w0=DECODE)
    registry.report(report("w0", registry, leaning=PREFILL), 2.0)
    registry.report(report("w0", registry), 3.0)
    assert found(registry, "w0").pool == "decode"


def test_a_pinned_worker_may_say_where_it_is_and_nothing_else() -> None:
    registry = Registry(5.0)
    registry.register(registration("d", DECODE), 0.0)
    registry.report(report("d", registry, leaning=DECODE), 1.0)
    with pytest.raises(InvalidArgumentError, match="not neutral") as caught:
        registry.report(report("d", registry, leaning=PREFILL), 1.0)
    assert caught.value.field == "leaning"
    assert found(registry, "d").pool == "decode"
    with pytest.raises(InvalidArgumentError) as caught:
        check_report(report("d", registry, leaning=7))
    assert caught.value.field == "leaning"


def test_a_whole_side_may_be_ejected_while_the_other_stands_in() -> None:
    class Open:
        admits, state = False, "open"

    registry = cluster(w0=PREFILL, w1=DECODE)
    found_open = circuit_statuses(registry.snapshot(), {(("w0", 1),): Open()})  # type: ignore[dict-item]
    assert found_open["w0", 1].tripped
    both = {((name, 1),): Open() for name in ("w0", "w1")}
    statuses = circuit_statuses(registry.snapshot(), both)  # type: ignore[arg-type]
    assert not all(status.tripped for status in statuses.values())


@pytest.mark.parametrize(
    ("leanings", "expected"),
    [
        ({"w0": PREFILL}, (1, 1)),
        ({"w0": DECODE, "w1": DECODE}, (2, 2)),
        ({"w0": DECODE, "w1": PREFILL, "w2": DECODE}, (1, 2)),
        ({}, (0, 0)),
    ],
)
def test_a_pool_that_neutral_workers_stand_in_for_is_not_empty(
    leanings: dict[str, registry_pb2.Pool.ValueType], expected: tuple[int, int]
) -> None:
    """Else an alert would page somebody for a cluster that serves."""
    metrics = {one.name: one for one in coordinator_metrics(cluster(**leanings).snapshot(), 0, {})}
    counts = {one.labels["pool"]: one.value for one in metrics["splitserve_ready_workers"].samples}
    assert (counts["prefill"], counts["decode"]) == expected


def test_golden_prompts_run_on_each_neutral_worker_and_between_all_of_them() -> None:
    targets = targets_of(cluster(w0=PREFILL, w1=DECODE).snapshot(), "words")
    names = {(target.prefill_name, target.decode[0]) for target in targets}
    assert names == {("", "w0"), ("", "w1"), ("w0", "w1"), ("w1", "w0")}


def test_a_plan_that_names_leanings_goes_before_the_planner_while_it_is_in_force() -> None:
    registry = cluster(w0=PREFILL, w1=DECODE)
    registry.register(registration("d", DECODE), 0.0)

    def asked() -> list[PoolName | None]:
        return [registry.leaning_asked_of(found(registry, name)) for name in ("w0", "w1", "d")]

    registry.ask_leanings({("w1", 1): "prefill"})
    assert asked() == [None, "prefill", None]
    request = scaling_pb2.ApplyPlanRequest(
        decode_leaning_worker_ids=["w0", "w1"], prefill_leaning_worker_ids=["d"]
    )
    registry.apply_plan(checked_plan(request, 0.0))
    assert asked() == ["decode", None, None]
    registry.report(report("w0", registry, leaning=DECODE), 2.0)
    assert asked() == [None, None, None]
    registry.expire(31.0, absent_s=30.0)
    assert asked() == [None, "prefill", None]


def test_a_plan_names_a_worker_for_one_side() -> None:
    request = scaling_pb2.ApplyPlanRequest(
        decode_leaning_worker_ids=["w0"], prefill_leaning_worker_ids=["w0"]
    )
    with pytest.raises(InvalidArgumentError) as caught:
        checked_plan(request, 0.0)
    assert caught.value.field == "decode_leaning_worker_ids"
