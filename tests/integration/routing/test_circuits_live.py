"""Circuit breakers in a coordinator with scripted workers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from coordinator.workers.snapshot import Worker
from splitserve.errors import ResourceExhaustedError, UnavailableError
from splitserve.v1 import decode_pb2, inference_pb2
from tests.support.cluster.fake_cluster import Collected, FakeCluster, ask, expected, fake_cluster, read
from tests.support.cluster.fake_workers import FakePrefill
from tests.support.journal import settled

pytestmark = pytest.mark.timeout(60)

BREAKER: dict[str, Any] = {"consecutive_failures": 3, "open_s": 60.0}
STOPPED = UnavailableError("scripted", reason="ENGINE_STOPPED")


class Always(list[Exception]):
    """A list of failures that never ends."""

    def __init__(self, failure: Callable[[], Exception]) -> None:
        super().__init__()
        self.failure = failure

    def __bool__(self) -> bool:
        return True

    def pop(self, index: Any = 0) -> Exception:
        return self.failure()


def worker(cluster: FakeCluster, name: str) -> Worker:
    return next(w for w in cluster.coordinator.registry.snapshot().workers if w.worker_id == name)


async def info(cluster: FakeCluster, name: str) -> inference_pb2.WorkerInfo:
    response = await cluster.client.GetServerInfo(inference_pb2.GetServerInfoRequest())
    return next(w for w in response.workers if w.worker_id == name)


async def answered(cluster: FakeCluster, requests: int) -> None:
    """So many requests, all of them whole."""
    for _ in range(requests):
        assert (await cluster.answer(ask(4))).token_ids == expected(4)


async def tripped(cluster: FakeCluster, bad: FakePrefill) -> None:
    """Has a worker fail until its circuit opens, and sends nothing after that, which might be its probe."""
    bad.failures = [STOPPED] * BREAKER["consecutive_failures"]
    while bad.failures:
        await answered(cluster, 1)


async def test_a_failing_prefill_worker_leaves_routing_and_nobody_else_does() -> None:
    async with fake_cluster(prefill=2, decode=2, circuit_breaker=BREAKER) as cluster:
        bad = cluster.prefills[0]
        bad.failures = Always(lambda: STOPPED)
        await answered(cluster, 20)
        assert len(bad.calls.entries) == 3
        shown = await info(cluster, "p0")
        assert (shown.state, shown.circuit, shown.tripped) == ("circuit-open", "open", True)
        for name in ("p1", "d0", "d1"):
            assert (await info(cluster, name)).circuit == "closed"
        metric = next(m for m in cluster.coordinator.metrics() if m.name == "splitserve_circuits")
        assert {tuple(s.labels.values()): s.value for s in metric.samples if s.value} == {
            ("prefill", "open"): 1
        }


async def test_a_decode_worker_that_fails_does_not_open_the_prefill_workers() -> None:
    async with fake_cluster(prefill=1, decode=2, circuit_breaker=BREAKER) as cluster:
        cluster.decodes[0].failure = decode_pb2.Failure(reason="ENGINE_STOPPED", message="scripted")
        await answered(cluster, 20)
        assert worker(cluster, "d0").circuit.tripped
        assert worker(cluster, "p0").circuit.state == "closed"
        assert len(cluster.decodes[0].reserves.entries) == 3


async def test_a_broken_lane_takes_out_the_pair() -> None:
    # Two and three, so that workers that take turns meet in all pairs.
    async with fake_cluster(prefill=2, decode=3, circuit_breaker=BREAKER) as cluster:
        bad, unreached = cluster.prefills[0], cluster.decodes[1]
        bad.broken_lanes.add(unreached.agent_id)
        await answered(cluster, 60)
        prefill = worker(cluster, "p0")
        assert prefill.circuit.ejected_agents == {unreached.agent_id}
        assert (prefill.circuit.state, worker(cluster, "d1").circuit.state) == ("closed", "closed")
        tried = [call for call in bad.calls.entries if call.ticket.decode_agent_id == unreached.agent_id]
        assert len(tried) == 3
        assert len(bad.calls.entries) > 3, "it still serves with the other decode worker"
        others = cluster.prefills[1].calls.entries
        assert any(call.ticket.decode_agent_id == unreached.agent_id for call in others)


async def test_what_is_nobodys_fault_never_counts() -> None:
    async with fake_cluster(prefill=1, decode=1, circuit_breaker=BREAKER) as cluster:
        decode = cluster.decodes[0]
        decode.reserve_failures = [ResourceExhaustedError("full") for _ in range(6)]
        for _ in range(6):
            await cluster.error(ask())
        for _ in range(6):
            await cluster.error(ask(text=""))
        decode.token_gate.close()
        for _ in range(6):
            call = cluster.call(ask(6))
            await read(call, Collected(), 1)
            call.cancel()
            await cluster.error(ask(6), timeout=0.1)
        decode.token_gate.open()
        await answered(cluster, 1)
        assert all(w.circuit.state == "closed" for w in cluster.coordinator.registry.snapshot().workers)


async def test_the_last_worker_stays_in_use_and_recovers_at_once() -> None:
    async with fake_cluster(prefill=1, decode=1, circuit_breaker=BREAKER) as cluster:
        cluster.prefills[0].failures = Always(lambda: STOPPED)
        for _ in range(3):
            assert (await cluster.error(ask())).reason == "ENGINE_STOPPED"
        shown = await info(cluster, "p0")
        assert (shown.circuit, shown.tripped, shown.state) == ("open", False, "ready")
        cluster.prefills[0].failures = []
        await answered(cluster, 3)
        assert (await info(cluster, "p0")).circuit == "closed"


async def test_one_request_probes_a_worker_that_has_rested() -> None:
    async with fake_cluster(prefill=2, circuit_breaker=BREAKER | {"open_s": 3.0}) as cluster:
        bad = cluster.prefills[0]
        await tripped(cluster, bad)
        await settled(lambda: worker(cluster, "p0").circuit.state == "half-open")
        bad.first_token_gate.close()
        probing = [asyncio.create_task(cluster.answer(ask(4))) for _ in range(10)]
        await bad.calls.wait(4)
        await settled(lambda: sum(task.done() for task in probing) == 9)
        await answered(cluster, 5)
        assert len(bad.calls.entries) == 4, "the others go elsewhere until the probe has its answer"
        bad.first_token_gate.open()
        assert all(answer.token_ids == expected(4) for answer in await asyncio.gather(*probing))
        await settled(lambda: worker(cluster, "p0").circuit.state == "closed")
        await answered(cluster, 6)
        assert len(bad.calls.entries) > 4


async def test_a_probe_whose_client_leaves_makes_room_for_the_next() -> None:
    async with fake_cluster(prefill=2, circuit_breaker=BREAKER | {"open_s": 3.0}) as cluster:
        bad = cluster.prefills[0]
        await tripped(cluster, bad)
        await settled(lambda: worker(cluster, "p0").circuit.state == "half-open")
        bad.first_token_gate.close()
        calls = [cluster.call(ask(4)) for _ in range(4)]
        reads = [asyncio.create_task(read(call, Collected(), 1)) for call in calls]
        await bad.calls.wait(4)
        assert worker(cluster, "p0").circuit.tripped
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await settled(lambda: not worker(cluster, "p0").circuit.tripped)
        bad.first_token_gate.open()
        await answered(cluster, 6)
        await settled(lambda: worker(cluster, "p0").circuit.state == "closed")


async def test_a_new_boot_begins_closed() -> None:
    async with fake_cluster(prefill=2, circuit_breaker=BREAKER) as cluster:
        cluster.prefills[0].failures = Always(lambda: STOPPED)
        await answered(cluster, 8)
        assert worker(cluster, "p0").circuit.tripped
        await cluster.prefills.pop(0).stop()
        again = await cluster.add_prefill("p0")
        await cluster.all_ready()
        assert worker(cluster, "p0").circuit.state == "closed"
        await answered(cluster, 6)
        assert again.calls.entries
        await settled(lambda: not cluster.coordinator.breakers._breakers)


async def test_it_can_be_turned_off() -> None:
    async with fake_cluster(prefill=2, circuit_breaker=BREAKER | {"enabled": False}) as cluster:
        cluster.prefills[0].failures = Always(lambda: STOPPED)
        await answered(cluster, 12)
        assert len(cluster.prefills[0].calls.entries) > 3
        assert (await info(cluster, "p0")).circuit == "closed"


async def test_the_error_of_a_pool_that_fails_is_typed() -> None:
    async with fake_cluster(prefill=2, circuit_breaker=BREAKER) as cluster:
        for prefill in cluster.prefills:
            prefill.failures = Always(lambda: STOPPED)
        for _ in range(5):
            error = await cluster.error(ask())
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")
