"""Pinned workers that trade prefixes, in the registry: whom they write to, and that requests stay in their pools."""

from __future__ import annotations

import pytest

from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE


def trading(name: str, pool: registry_pb2.Pool.ValueType) -> registry_pb2.RegisterRequest:
    request = registration(name, pool)
    request.trades_prefixes = True
    return request


def found(registry: Registry, name: str) -> Worker:
    worker = registry.get((name, 1))
    assert worker is not None
    return worker


def peers(registry: Registry) -> dict[str, str]:
    """Whom each worker writes to."""
    workers = registry.snapshot().workers
    names = {worker.agent_id: worker.worker_id for worker in workers}
    return {
        worker.worker_id: " ".join(names[peer.agent_id] for peer in registry.peers_of(worker))
        for worker in workers
    }


def report(registry: Registry, name: str) -> None:
    agents = [peer.agent_id for peer in registry.peers_of(found(registry, name))]
    registry.report(registry_pb2.ReportRequest(worker_id=name, epoch=1, connected_agent_ids=agents), 1.0)


@pytest.mark.parametrize("trade", [True, False])
def test_those_that_do_not_trade_are_connected_as_before(trade: bool) -> None:
    registry = Registry(5.0, trade=trade)
    for name, pool in (("d0", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        registry.register(registration(name, pool), 0.0)
    assert peers(registry) == {"d0": "", "p0": "d0", "p1": "d0"}
    assert not any(worker.trades or worker.takes_kv for worker in registry.snapshot().workers[1:])


def test_those_that_trade_write_to_each_other_and_hear_of_ended_writers() -> None:
    registry = Registry(5.0)
    for name, pool in (("d0", DECODE), ("d1", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        registry.register(trading(name, pool), 0.0)
    registry.register(registration("old-d", DECODE), 0.0)
    registry.register(registration("old-p", PREFILL), 0.0)
    neutral = registration("n", PREFILL)
    neutral.neutral = neutral.trades_prefixes = True
    registry.register(neutral, 0.0)
    assert peers(registry) == {
        "d0": "d1 n p0 p1",
        "d1": "d0 n p0 p1",
        "n": "d0 d1 old-d p0 p1",
        "old-d": "",
        "old-p": "d0 d1 n old-d",
        "p0": "d0 d1 n old-d p1",
        "p1": "d0 d1 n old-d p0",
    }
    registry.mark_ended(found(registry, "d0"))
    told = [w.worker_id for w in registry.snapshot().workers if registry.ended_writers_for(w)]
    assert told == ["d0", "d1", "n", "old-d", "p0", "p1"]


def test_nothing_is_traded_where_the_coordinator_fetches_nothing() -> None:
    registry = Registry(5.0, trade=False)
    for name, pool in (("d0", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        registry.register(trading(name, pool), 0.0)
    assert peers(registry) == {"d0": "", "p0": "d0", "p1": "d0"}


def test_requests_stay_in_their_pools_and_wait_for_no_lane_of_prefixes() -> None:
    registry = Registry(5.0)
    for name, pool in (("d0", DECODE), ("p0", PREFILL), ("p1", PREFILL)):
        registry.register(trading(name, pool), 0.0)
    registry.set_output_open(("d0", 1), True)
    d0 = found(registry, "d0")
    for name in ("p0", "p1"):  # connected to the decode worker alone
        registry.report(
            registry_pb2.ReportRequest(worker_id=name, epoch=1, connected_agent_ids=[d0.agent_id]), 1.0
        )
    registry.report(registry_pb2.ReportRequest(worker_id="d0", epoch=1), 1.0)
    snapshot = registry.snapshot()
    assert all(snapshot.is_ready(worker) for worker in snapshot.workers)
    for name, computes in (("d0", False), ("p0", True)):
        worker = found(registry, name)
        assert (worker.computes_prompts, worker.decodes) == (computes, not computes)
    assert not found(registry, "p0").reaches(found(registry, "p0"))


def test_a_prefill_worker_takes_prefixes_while_its_output_stream_is_open() -> None:
    registry = Registry(5.0)
    registry.register(trading("p0", PREFILL), 0.0)
    report(registry, "p0")
    assert found(registry, "p0").usable, "prompts need no such stream"
    assert not found(registry, "p0").takes_prefixes
    registry.set_output_open(("p0", 1), True)
    assert found(registry, "p0").takes_prefixes
    registry.register(registration("p1", PREFILL), 0.0)
    registry.set_output_open(("p1", 1), True)
    assert not found(registry, "p1").takes_prefixes
