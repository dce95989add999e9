"""What admission takes of neutral workers that serve both pools: the work of each of them once."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.admission.controller import CapacityAdmission
from coordinator.workers.registry import Registry
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.v1 import registry_pb2
from tests.support.clients.admission_parts import entry, load
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)
POOLS = [registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE]


@pytest.mark.parametrize("pool", POOLS)
async def test_a_worker_that_stands_in_adds_no_prefill_capacity_to_its_own(
    pool: registry_pb2.Pool.ValueType,
) -> None:
    """Decode workers that may compute prompts add theirs; the only worker of both pools has no more than its own."""
    registry = Registry(5.0)
    request = registration("n", pool)
    request.neutral = True
    registry.register(request, 0.0)
    registry.set_output_open(("n", 1), True)
    report = registry_pb2.ReportRequest(worker_id="n", epoch=1, load=load())
    registry.report(report, 0.0)
    config = CoordinatorConfig(local_prefill="auto")
    admission = CapacityAdmission(config, registry, lambda model, held: None)
    tokens = 0.4 * 10_000 * config.admission.prefill_horizon_s
    waits = [
        asyncio.create_task(admission.wait("words", entry(int(tokens), arrived_s=now, deadline_s=now + 60)))
        for now in [time.monotonic()] * 3
    ]
    for _ in range(3):
        await asyncio.sleep(0)
        registry.report(report, 1.0)
    assert [wait.done() for wait in waits] == [True, True, False]
    waits[2].cancel()
    await asyncio.wait(waits)
