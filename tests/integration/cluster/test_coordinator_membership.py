"""Which workers may serve, what is refused, and how the coordinator ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from coordinator.workers import registry_service
from splitserve.errors import ResourceExhaustedError, UnavailableError
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import Collected, ask, collect, expected, fake_cluster, finish, read
from tests.support.cluster.fake_workers import FakePrefill
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(30)


async def test_a_full_decode_worker_is_the_clients_to_know() -> None:
    async with fake_cluster() as cluster:
        full = ResourceExhaustedError("queue full", reason="QUEUE_FULL", retry_after_s=0.5)
        cluster.decodes[0].reserve_failures = [full]
        error = await cluster.error(ask())
        assert (type(error), error.reason, error.retry_after_s) == (ResourceExhaustedError, "QUEUE_FULL", 0.5)
        assert cluster.prefills[0].calls.entries == []


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [(0, 0, "no prefill and no decode"), (1, 0, "no decode"), (0, 1, "no prefill")],
)
async def test_a_missing_pool_is_named_quickly(prefill: int, decode: int, named: str) -> None:
    async with fake_cluster(prefill, decode, no_worker_wait_s=0.1) as cluster:
        error = await cluster.error(ask())
        assert isinstance(error, UnavailableError)
        assert error.reason == "NO_WORKER"
        assert named in error.message
        assert error.retry_after_s is not None


async def test_a_request_waits_for_a_pool_that_comes_in_time() -> None:
    async with fake_cluster(decode=0, no_worker_wait_s=PATIENCE_S) as cluster:
        reading = asyncio.create_task(cluster.answer(ask(4)))
        await settled(lambda: cluster.coordinator.api.running == 1)
        await cluster.add_decode("late")
        assert (await reading).token_ids == expected(4)


async def test_too_many_requests_are_refused_with_a_hint() -> None:
    async with fake_cluster(max_running_requests=1) as cluster:
        cluster.prefills[0].first_token_gate.close()
        first = asyncio.create_task(cluster.answer(ask(3)))
        await cluster.prefills[0].calls.wait()
        error = await cluster.error(ask(3))
        assert isinstance(error, ResourceExhaustedError)
        assert error.retry_after_s is not None
        cluster.prefills[0].first_token_gate.open()
        assert (await first).token_ids == expected(3)


async def test_a_worker_with_another_layout_is_refused() -> None:
    async with fake_cluster() as cluster:
        odd = await cluster.add_decode("odd", dtype="bfloat16")
        error = await odd.refused.wait()
        assert (error.reason, error.field) == ("LAYOUT_MISMATCH", "dtype")
        other = await cluster.add_prefill("other", transport="ucx")
        assert (await other.refused.wait()).reason == "TRANSPORT_MISMATCH"
        assert len(cluster.coordinator.registry.snapshot().workers) == 2
        assert (await cluster.answer(ask(4))).token_ids == expected(4)


async def test_prefill_workers_learn_of_every_decode_worker() -> None:
    async with fake_cluster(decode=1) as cluster:
        late = await cluster.add_decode("late")
        await cluster.all_ready()
        assert late.agent_id in cluster.prefills[0].peer_lists.entries[-1]
        await late.stop()
        await settled(lambda: late.agent_id not in cluster.prefills[0].peer_lists.entries[-1])
        cluster.decodes.remove(late)


async def test_a_worker_that_did_not_connect_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_service, "RESEND_PEERS_S", 0.05)
    async with fake_cluster(decode=1, prefill=1) as cluster:
        late = FakePrefill("late", cluster.address, cluster.decode_of)
        late.deaf = True
        cluster.prefills.append(late)
        await late.start()
        await late.peer_lists.wait(3)
        assert not late.peers
        late.deaf = False
        await cluster.all_ready()
        assert late.peers


async def test_draining_workers_get_nothing_new() -> None:
    async with fake_cluster(decode=2) as cluster:
        cluster.decodes[0].drain()
        await settled(lambda: any(w.draining for w in cluster.coordinator.registry.snapshot().workers))
        for _ in range(4):
            await cluster.answer(ask(3))
        assert cluster.decodes[0].reserves.entries == []


async def test_equal_workers_take_turns() -> None:
    async with fake_cluster(prefill=2, decode=2) as cluster:
        for _ in range(8):
            await cluster.answer(ask(2))
        assert all(worker.calls.entries for worker in cluster.prefills)
        assert all(worker.reserves.entries for worker in cluster.decodes)


async def test_a_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    async with fake_cluster(drain_s=PATIENCE_S) as cluster:
        cluster.decodes[0].pause_at = 3
        call, answer = cluster.call(ask(8)), Collected()
        await read(call, answer, 3)
        draining = asyncio.create_task(cluster.coordinator.drain())
        await settled(lambda: cluster.coordinator.api.draining)
        error = await cluster.error(ask(3))
        assert error.reason == "DRAINING"
        assert not draining.done()
        cluster.decodes[0].token_gate.open()
        await finish(call, answer)
        assert answer.token_ids == expected(8)
        await draining


async def test_a_coordinator_that_stops_aborts_what_still_runs() -> None:
    async with fake_cluster(drain_s=0.0) as cluster:
        decode = cluster.decodes[0]
        decode.pause_at = 3
        call = cluster.call(ask(8))
        await read(call, Collected(), 3)
        await cluster.coordinator.drain()
        await cluster.coordinator.close()
        assert len(decode.aborts.entries) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert error_from_rpc(caught.value).reason == "DRAINING"


async def test_server_info_and_models() -> None:
    async with fake_cluster(prefill=1, decode=1) as cluster:
        info = await cluster.client.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert [(w.worker_id, w.role, w.state) for w in info.workers] == [
            ("d0", "decode", "ready"),
            ("p0", "prefill", "ready"),
        ]
        assert (info.running_requests, info.background_tasks) == (0, 0)
        models = (await cluster.client.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(m.name, m.context_tokens, m.has_chat_template, m.ready) for m in models] == [
            ("words", 64, True, True)
        ]
