"""Workers that fail, hang or vanish, and clients that leave: the coordinator with scripted workers."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest

from splitserve.errors import TransferError, UnavailableError
from splitserve.rpc import error_from_rpc
from splitserve.v1 import decode_pb2
from tests.fakes.fake_cluster import (
    Collected,
    ask,
    collect,
    expected,
    fake_cluster,
    finish,
    read,
    slow_client,
)
from tests.fakes.fake_workers import FakeWorker
from tests.fakes.gates import settled

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("phase", ["reserving", "prefilling", "transferring", "decoding"])
async def test_a_client_that_leaves_ends_the_request_everywhere(phase: str) -> None:
    async with fake_cluster() as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        call = cluster.call(ask(20))
        if phase == "reserving":
            decode.reserve_gate.close()
            reading = asyncio.create_task(call.read())
            await decode.reserves.wait()
        elif phase == "prefilling":
            prefill.first_token_gate.close()
            reading = asyncio.create_task(call.read())
            await prefill.calls.wait()
        elif phase == "transferring":
            prefill.handoff_gate.close()
            reading = asyncio.create_task(read(call, Collected(), 1))
            await reading
        else:
            decode.pause_at = 4
            reading = asyncio.create_task(read(call, Collected(), 4))
            await reading
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        aborted = await decode.aborts.wait()
        assert aborted.no_writer == (phase in ("reserving", "decoding"))
        if phase in ("prefilling", "transferring"):
            assert await prefill.given_up.wait() == aborted.request_id
        assert len(prefill.calls.entries) == (0 if phase == "reserving" else 1)
        assert decode.live == 0
        decode.reserve_gate.open()


async def test_a_broken_output_stream_resumes_on_the_other_decode_worker() -> None:
    async with fake_cluster(decode=2) as cluster:
        for decode in cluster.decodes:
            decode.pause_at = 5
        call, answer = cluster.call(ask(12, sampling={"seed": 7})), Collected()
        await read(call, answer, 5)
        broken, other = sorted(cluster.decodes, key=lambda d: -d.live)
        other.pause_at = None
        broken.break_streams()
        await finish(call, answer)
        assert answer.token_ids == expected(12)
        assert answer.text == "".join(f" w{token}" for token in expected(12))
        assert answer.done is not None
        assert answer.done.served_by.attempts == 2
        assert answer.done.served_by.decode_worker == other.worker_id
        assert answer.done.usage.prompt_tokens == 3
        resumed = other.reserves.entries[0]
        assert list(resumed.token_ids) == [1, 2, 3, *expected(5)]
        assert (resumed.prior_output_tokens, resumed.stop.max_tokens, resumed.sampling.seed) == (5, 12, 7)


async def test_a_killed_decode_worker_resumes_on_the_other() -> None:
    async with fake_cluster(decode=2) as cluster:
        for decode in cluster.decodes:
            decode.pause_at = 3
        call, answer = cluster.call(ask(10)), Collected()
        await read(call, answer, 3)
        killed, other = sorted(cluster.decodes, key=lambda d: -d.live)
        other.pause_at = None
        await killed.stop()
        await finish(call, answer)
        assert answer.token_ids == expected(10)


async def test_without_another_decode_worker_the_end_is_typed_and_soon() -> None:
    async with fake_cluster() as cluster:
        decode = cluster.decodes[0]
        decode.pause_at = 3
        call = cluster.call(ask(10))
        await read(call, Collected(), 3)
        await decode.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(collect(call), 5)
        error = error_from_rpc(caught.value)
        assert isinstance(error, UnavailableError)
        assert "no decode worker" in error.message


async def test_a_failure_reported_by_decode_is_resumed() -> None:
    async with fake_cluster(decode=2) as cluster:
        cluster.decodes[0].failure = decode_pb2.Failure(reason="LEASE_EXPIRED", message="no completion")
        answers = [await cluster.answer(ask(4)) for _ in range(2)]
        assert [answer.token_ids for answer in answers] == [expected(4)] * 2
        assert {answer.done.served_by.decode_worker for answer in answers if answer.done} == {"d1"}


async def test_a_failed_prefill_is_retried_on_the_other() -> None:
    async with fake_cluster(prefill=2) as cluster:
        for prefill in cluster.prefills:
            prefill.failures = [UnavailableError("scripted")]
        answer = await cluster.answer(ask(5))
        assert answer.token_ids == expected(5)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 3
        aborted = await cluster.decodes[0].aborts.wait(2)
        assert not aborted.no_writer


async def test_a_failed_transfer_after_the_first_token_is_resumed() -> None:
    async with fake_cluster(decode=2) as cluster:
        cluster.prefills[0].handoff_failures = [TransferError("scripted")]
        answer = await cluster.answer(ask(5))
        assert answer.token_ids == expected(5)
        first, second = cluster.prefills[0].calls.entries
        assert first.ticket.decode_agent_id != second.ticket.decode_agent_id
        assert second.prior_output_tokens == 1


async def test_attempts_are_bounded() -> None:
    async with fake_cluster() as cluster:
        cluster.prefills[0].failures = [UnavailableError("scripted") for _ in range(10)]
        error = await cluster.error(ask())
        assert isinstance(error, UnavailableError)
        assert "attempt 3 of 3" in error.message
        assert len(cluster.prefills[0].calls.entries) == 3


async def test_the_timeout_ends_a_request_at_both_workers() -> None:
    async with fake_cluster() as cluster:
        cluster.decodes[0].pause_at = 3
        error = await cluster.error(ask(10, timeout={"nanos": 300_000_000}))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.reason == "DEADLINE_EXCEEDED"
        await cluster.decodes[0].aborts.wait()
        assert cluster.prefills[0].calls.entries[0].timeout.ToTimedelta().total_seconds() <= 0.3


async def test_the_calls_own_deadline_travels_too() -> None:
    async with fake_cluster() as cluster:
        cluster.prefills[0].first_token_gate.close()
        error = await cluster.error(ask(10), timeout=0.3)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert cluster.decodes[0].reserves.entries[0].timeout.ToTimedelta().total_seconds() <= 0.3
        await cluster.prefills[0].given_up.wait()
        await cluster.decodes[0].aborts.wait()


async def test_a_client_that_stops_reading_is_ended_by_its_deadline() -> None:
    async with fake_cluster() as cluster, slow_client(cluster) as client:
        cluster.decodes[0].padding = 100_000
        request = ask(60, timeout={"nanos": 500_000_000})
        slow, late = client.Generate(request, timeout=20), Collected()
        late.add(await slow.read())
        await settled(lambda: cluster.coordinator.door.running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(slow, late)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("phase", ["reserving", "prefilling"])
async def test_calls_that_hang_on_a_lost_worker_are_made_again_elsewhere(phase: str) -> None:
    async with fake_cluster(prefill=2, decode=2) as cluster:
        stuck: list[FakeWorker] = []
        if phase == "reserving":
            for decode in cluster.decodes:
                decode.reserve_gate.close()
        else:
            for prefill in cluster.prefills:
                prefill.first_token_gate.close()
        reading = asyncio.create_task(cluster.answer(ask(5)))
        await settled(lambda: any(worker.open_rpcs.count for worker in cluster.workers))
        stuck = [worker for worker in cluster.workers if worker.open_rpcs.count]
        for worker in (*cluster.decodes, *cluster.prefills):
            if worker not in stuck:
                worker.let_go()
        stuck[0].fall_silent()
        answer = await asyncio.wait_for(reading, 5)
        assert answer.token_ids == expected(5)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 2
        stuck[0].let_go()


async def test_a_restarted_worker_serves_under_its_new_boot() -> None:
    async with fake_cluster() as cluster:
        for _ in range(3):
            await cluster.decodes[0].stop()
            cluster.decodes.clear()
            await cluster.add_decode("d0")
            await cluster.all_ready()
            assert (await cluster.answer(ask(4))).token_ids == expected(4)


async def test_fifty_requests_at_once_with_cancels() -> None:
    async with fake_cluster(prefill=2, decode=2) as cluster:
        numbers = itertools.count()

        async def one() -> None:
            if next(numbers) % 3:
                assert (await cluster.answer(ask(12))).token_ids == expected(12)
                return
            call = cluster.call(ask(12))
            await call.read()
            call.cancel()

        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(one())
        await settled(lambda: all(decode.live == 0 for decode in cluster.decodes))
