"""Requests at a coordinator without workers, which are started on demand: scripted workers over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.service import running_coordinator
from splitserve.client.scaling_client import MAX_DEMAND_S, ScalingClient
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.clients.patient import PatientScalingClient
from tests.support.cluster.fake_cluster import FakeCluster, ask, collect, expected, fake_cluster
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(60)
MODEL = registry_pb2.ServedModel(
    name="words", tokenizer_source="words", context_tokens=512, vocabulary_size=100
)


@asynccontextmanager
async def at_zero(**config: Any) -> AsyncIterator[tuple[FakeCluster, ScalingClient]]:
    """A coordinator that has never had a worker, and was told by an autoscaler that some are started on demand."""
    async with (
        fake_cluster(prefill=0, decode=0, **config) as cluster,
        PatientScalingClient(cluster.address) as scaling,
    ):
        await scaling.apply_plan(on_demand=[MODEL], valid_s=PATIENCE_S)
        yield cluster, scaling


async def waiting(scaling: ScalingClient) -> int:
    return sum(one.in_progress.waiting_for_workers for one in (await scaling.signals()).models)


async def until_waiting(scaling: ScalingClient, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await waiting(scaling) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["queue", "off"])
async def test_a_burst_waits_for_the_first_workers_and_none_of_it_is_lost(mode: str) -> None:
    async with at_zero(admission={"mode": mode}) as (cluster, scaling):
        calls = [asyncio.create_task(cluster.answer(ask(text=f"w{n} w2 w3"))) for n in range(1, 31)]
        assert await scaling.demand("words", MAX_DEMAND_S), "said at once"
        await until_waiting(scaling, 30)
        await cluster.add_decode("d0")
        await until_waiting(scaling, 30)
        await cluster.add_prefill("p0")
        for call in calls:
            assert (await call).token_ids == expected(6)
        assert await waiting(scaling) == 0
        (model,) = (await scaling.signals()).models
        ttft = next(one for one in model.phases if one.phase == scaling_pb2.PHASE_TTFT)
        assert (sum(ttft.counts), ttft.cold_samples) == (0, 30), "a cold start is no reason to scale"


@pytest.mark.parametrize("mode", ["queue", "off"])
async def test_who_leaves_or_comes_to_the_deadline_is_not_demand_any_more(mode: str) -> None:
    async with at_zero(admission={"mode": mode}) as (cluster, scaling):
        assert not await scaling.demand("words", 0.05)
        leaves = cluster.call(ask())
        reading = asyncio.create_task(collect(leaves))
        await until_waiting(scaling, 1)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until_waiting(scaling, 0)
        request = ask()
        request.timeout.FromMilliseconds(300)
        late = await cluster.error(request)
        assert late.reason == "WORKERS_NOT_READY"
        assert "'words' had no workers" in late.message
        assert "0.3 s" in late.message
        await until_waiting(scaling, 0)
        await settled(lambda: cluster.coordinator.api.running == 0)


@pytest.mark.parametrize("mode", ["queue", "off"])
async def test_how_many_wait_is_bounded(mode: str) -> None:
    async with at_zero(admission={"mode": mode, "max_queued_requests": 2}) as (cluster, scaling):
        calls = [asyncio.create_task(cluster.answer()) for _ in range(2)]
        await until_waiting(scaling, 2)
        refused = await cluster.error(ask())
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        await cluster.add_decode("d0")
        await cluster.add_prefill("p0")
        for call in calls:
            assert (await call).token_ids == expected(6)


async def test_once_nobody_starts_workers_those_that_wait_are_told() -> None:
    async with at_zero(heartbeat_timeout_s=0.2) as (cluster, scaling):
        await scaling.apply_plan(on_demand=[MODEL], valid_s=0.1)
        failed = asyncio.create_task(cluster.error(ask()))
        assert (await failed).reason == "NO_WORKER"
        assert (await cluster.error(ask())).reason == "NO_WORKER"


async def test_workers_that_go_in_the_middle_of_a_request_are_waited_for_again() -> None:
    async with at_zero() as (cluster, scaling):
        decode = await cluster.add_decode("d0")
        prefill = await cluster.add_prefill("p0")
        decode.token_gate.close()
        await cluster.all_ready()
        call = asyncio.create_task(cluster.answer(ask(max_tokens=8)))
        await settled(lambda: decode.token_gate.waiting > 0)  # so the prefill worker has handed over
        cluster.prefills.clear()
        cluster.decodes.clear()
        for gone in (prefill, decode):
            await gone.stop()
        await until_waiting(scaling, 1)
        await cluster.add_decode("d1")
        await cluster.add_prefill("p1")
        assert (await call).token_ids == expected(8)


async def test_each_of_two_coordinators_learns_the_model_and_tells_its_own_demand() -> None:
    settings = CoordinatorConfig(grpc_port=0, http_port=None)
    async with (
        at_zero() as (one, first),
        running_coordinator(settings, load=load_word_tokenizer) as other,
        PatientScalingClient(f"127.0.0.1:{other.port}") as second,
    ):
        await second.apply_plan(on_demand=[MODEL], valid_s=PATIENCE_S)
        call = asyncio.create_task(one.answer())
        assert await first.demand("words", MAX_DEMAND_S)
        assert await waiting(second) == 0
        served = (await first.signals()).models[0].served
        assert served == MODEL
        began_s = time.monotonic()
        assert not await second.demand("words", 0.1)
        assert time.monotonic() - began_s >= 0.1
        await one.add_decode("d0")
        await one.add_prefill("p0")
        assert (await call).token_ids == expected(6)
