"""Requests that wait at the coordinator, with scripted workers over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.admission.controller import CapacityAdmission
from coordinator.request.inference_request import ANYONE, Caller
from coordinator.request.sending import WaitingOutput
from coordinator.request.state import RequestState
from coordinator.request_events import RequestEvents
from coordinator.service import Coordinator
from splitserve.errors import ResourceExhaustedError
from splitserve.v1 import scaling_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.fake_cluster import (
    Collected,
    FakeCluster,
    ask,
    expected,
    fake_cluster,
    finish,
    read,
    slow_client,
)
from tests.support.cluster.fake_workers import SAID_QUEUE_MS
from tests.support.deadlines import kept_timeouts, passes_now
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S, SLACK_S

pytestmark = pytest.mark.timeout(30)
LIMIT_S = 2 * int(PATIENCE_S)
"""A deadline of a request that no other timeout equals."""
FITTING = 2
"""Requests that 5 blocks hold at a time, as `ask` makes them."""


def admission_of(cluster: FakeCluster) -> CapacityAdmission:
    return cluster.coordinator.admission


def queued(cluster: FakeCluster) -> int:
    return sum(admission.queue.requests for admission in admission_of(cluster)._models.values())


def stats_of(coordinator: Coordinator) -> Any:
    return coordinator.stats.of("words")


@asynccontextmanager
async def full_cluster(prefill: int = 1, **config: Any) -> AsyncIterator[tuple[FakeCluster, list[Any]]]:
    """Decode holds as much as it can, and goes on as soon as its token gate opens."""
    async with fake_cluster(prefill=prefill, decode=0, **config) as cluster:
        decode = await cluster.add_decode("d0")
        decode.load = {"total_blocks": 5, "free_blocks": 5}
        decode.token_gate.close()
        await cluster.all_ready()
        await settled(lambda: cluster.coordinator.registry.snapshot().workers[0].load.total_blocks == 5)
        calls = [asyncio.create_task(cluster.answer(ask(6))) for _ in range(FITTING)]
        await decode.reserves.wait(FITTING)
        yield cluster, calls
        decode.token_gate.open()
        for answer in await asyncio.gather(*calls):
            assert answer.token_ids == expected(6)
        assert queued(cluster) == 0


async def test_a_full_decode_pool_holds_requests_back_and_a_freed_slot_needs_no_heartbeat() -> None:
    async with full_cluster(prefill=2) as (cluster, calls):
        decode = cluster.decodes[0]
        calls += [asyncio.create_task(cluster.answer(ask(6))) for _ in range(6)]
        await settled(lambda: queued(cluster) == 6)
        assert len(decode.reserves.entries) == FITTING
        stages = stats_of(cluster.coordinator).stages
        assert stages[next(stage for stage in stages if stage.value == "reserving")] == 6
        # From here on only requests themselves can tell admission that there is room.
        cluster.coordinator.registry._listeners.clear()
        began = time.monotonic()
        decode.token_gate.open()
        answers = await asyncio.gather(*calls)
        assert time.monotonic() - began < SLACK_S / 2, "less than the longest wait in the queue"
        # What was held back does not herd onto one prefill worker.
        shares = [len(prefill.calls.entries) for prefill in cluster.prefills]
        assert min(shares) >= 2
        waits = sorted(answer.done.timings.queue_ms for answer in answers if answer.done)
        assert waits[-1] >= waits[0]
        phase = stats_of(cluster.coordinator).phases[scaling_pb2.PHASE_RESERVE]
        assert phase.cold.total + phase.warm.total == 8
        counts = admission_of(cluster).counts()["words"]
        assert counts.queued["standard"] == 0


async def test_time_in_the_queue_is_part_of_the_timings() -> None:
    async with full_cluster() as (cluster, _calls):
        began = time.monotonic()
        late = asyncio.create_task(cluster.answer(ask(6)))
        await settled(lambda: queued(cluster) == 1)
        await asyncio.sleep(0.2)
        cluster.decodes[0].token_gate.open()
        done = (await late).done
        assert done is not None
        waited_ms = done.timings.queue_ms - SAID_QUEUE_MS
        assert 200 <= waited_ms <= (time.monotonic() - began) * 1e3
        assert done.timings.ttft_ms >= waited_ms


async def test_cancelling_and_a_deadline_free_the_place_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = kept_timeouts(monkeypatch, LIMIT_S)
    async with full_cluster() as (cluster, _calls):
        gone = cluster.call(ask(6))
        await settled(lambda: queued(cluster) == 1)
        late = asyncio.create_task(cluster.error(ask(6, timeout={"seconds": LIMIT_S}), timeout=None))
        await settled(lambda: queued(cluster) == 2)
        gone.cancel()
        passes_now(deadlines[0])
        error = await late
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(lambda: queued(cluster) == 0)
        assert len(cluster.decodes[0].reserves.entries) == FITTING


async def test_a_full_queue_is_a_typed_refusal_with_a_hint() -> None:
    async with full_cluster(admission={"max_queued_requests": 1}) as (cluster, calls):
        calls.append(asyncio.create_task(cluster.answer(ask(6))))
        await settled(lambda: queued(cluster) == 1)
        error = await cluster.error(ask(6))
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason == "QUEUE_FULL"
        assert error.retry_after_s is not None
        assert 0.1 <= error.retry_after_s <= 60
        assert stats_of(cluster.coordinator).outcomes[scaling_pb2.OUTCOME_REJECTED] == 1
        assert stats_of(cluster.coordinator).requests == FITTING + 2  # demand, served or not
        metrics = {metric.name: metric for metric in cluster.coordinator.metrics()}
        refused = metrics["splitserve_admission_refused"].samples
        assert {s.labels["reason"]: s.value for s in refused}["queue_full"] == 1
        waiting = metrics["splitserve_admission_queued_requests"].samples
        assert {s.labels["class"]: s.value for s in waiting} == {"interactive": 0, "standard": 1, "batch": 0}


async def test_waiting_ends_at_its_bound() -> None:
    async with full_cluster(admission={"max_queue_s": 0.3}) as (cluster, _calls):
        error = await cluster.error(ask(6))
        assert (type(error), error.reason) == (ResourceExhaustedError, "WAITED_TOO_LONG")


async def test_a_worker_that_joins_takes_from_the_queue() -> None:
    async with full_cluster() as (cluster, calls):
        calls.append(asyncio.create_task(cluster.answer(ask(6))))
        await settled(lambda: queued(cluster) == 1)
        other = await cluster.add_decode("d1")
        await other.reserves.wait()
        assert queued(cluster) == 0


async def test_a_higher_class_takes_a_place_in_the_queue() -> None:
    async with full_cluster(admission={"max_queued_requests": 1}) as (cluster, _calls):
        api = cluster.coordinator.api
        made = {"batch": dataclasses.replace(ANYONE, tenant="b", priority_class="batch")}
        made["chat"] = dataclasses.replace(ANYONE, tenant="c", priority_class="interactive")

        async def as_caller(caller: Caller) -> int:
            sent = []

            async def send(response: Any) -> None:
                sent.append(response)

            await api.generate(ask(6), caller, WaitingOutput(send))
            return len(sent)

        batch = asyncio.create_task(as_caller(made["batch"]))
        await settled(lambda: queued(cluster) == 1)
        chat = asyncio.create_task(as_caller(made["chat"]))
        with pytest.raises(ResourceExhaustedError) as caught:
            await batch
        assert caught.value.reason == "QUEUE_FULL"
        assert admission_of(cluster).of("words").queue.lengths()["interactive"] == 1
        cluster.decodes[0].token_gate.open()
        assert await chat


async def test_a_client_that_does_not_read_holds_no_slot() -> None:
    async with full_cluster() as (cluster, calls), slow_client(cluster) as client:
        decode = cluster.decodes[0]
        decode.token_gate.open()
        await asyncio.gather(*calls)
        decode.padding = 100_000
        stalled = [client.Generate(ask(60), timeout=PATIENCE_S) for _ in range(FITTING)]
        for call in stalled:
            await read(call, Collected(), 1)
        await settled(lambda: decode.live == 0)
        loads = admission_of(cluster).of("words").decode.workers.values()
        await settled(lambda: all(not load.flights for load in loads))
        decode.padding = 0
        assert (await cluster.answer(ask(6))).token_ids == expected(6)
        for call in stalled:
            call.cancel()


async def test_off_means_that_requests_wait_at_the_workers() -> None:
    async with fake_cluster(admission={"mode": "off"}) as cluster:
        assert not cluster.coordinator.admission.counts()
        decode = cluster.decodes[0]
        decode.load = {"total_blocks": 1}
        decode.reserve_gate.close()
        calls = [asyncio.create_task(cluster.answer(ask(6))) for _ in range(5)]
        await decode.reserves.wait(5)
        decode.reserve_gate.open()
        await asyncio.gather(*calls)


async def test_an_idle_gate_takes_no_loop_turn_and_hardly_any_time() -> None:
    async with fake_cluster() as cluster:
        await cluster.answer(ask(6))
        admission = admission_of(cluster)
        call, partly = cluster.call(ask(6)), Collected()
        await finish(call, partly)
        spent = []
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        generation = inference_request(
            max_tokens=6, model=cluster.coordinator.registry.known_models()["words"]
        )
        estimate = cluster.coordinator.estimates.of(generation, time.monotonic())
        for _ in range(300):
            asyncio.get_running_loop().call_soon(turn)
            with RequestEvents(RequestState(generation, estimate)) as events:
                began = time.perf_counter()
                await admission.admit(events.state)
                spent.append(time.perf_counter() - began)
                assert turns == 0
            admission.ended(events.state)
            await asyncio.sleep(0)
            turns = 0
        # 8 us on an idle core. The least of them: what the machine does beside it is in the others.
        assert min(spent) < 100e-6
