"""Workers that fail, hang or vanish, and clients that leave: the coordinator with scripted workers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import pytest

from coordinator.workers import client as worker_client
from coordinator.workers import output_stream
from splitserve.errors import TransferError, UnavailableError
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2
from tests.support.cluster.fake_cluster import (
    Collected,
    FakeCluster,
    ask,
    collect,
    expected,
    fake_cluster,
    finish,
    read,
    slow_client,
)
from tests.support.cluster.fake_workers import FakeDecode, FakeWorker
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

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


@pytest.mark.parametrize("lease_s", [0.0, 30.0])
async def test_a_broken_output_stream_resumes_on_the_other_decode_worker(
    lease_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDecode, "lease_s", lease_s)
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
            await asyncio.wait_for(collect(call), PATIENCE_S)
        error = error_from_rpc(caught.value)
        assert isinstance(error, UnavailableError)
        assert "no decode worker" in error.message


async def test_a_failure_reported_by_decode_is_resumed() -> None:
    async with fake_cluster(decode=2) as cluster:
        cluster.decodes[0].failure = decode_pb2.Failure(reason="TICKET_EXPIRED", message="no completion")
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
        assert "3 in a row without a token" in error.message
        assert len(cluster.prefills[0].calls.entries) == 3


async def test_an_answer_may_lose_workers_as_often_as_it_goes_on_in_between() -> None:
    async with fake_cluster(no_worker_wait_s=PATIENCE_S) as cluster:
        decode = cluster.decodes[0]
        decode.pause_at = 2
        call, answer = cluster.call(ask(40)), Collected()
        for position in range(2, 14, 2):
            await read(call, answer, position)
            decode.pause_at = position + 2
            decode.break_streams()
            decode.token_gate.open()
        decode.pause_at = None
        decode.let_go()
        await finish(call, answer)
        assert answer.token_ids == expected(40)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 7


async def test_after_progress_three_attempts_in_vain_are_the_end_again() -> None:
    async with fake_cluster() as cluster:
        decode, prefill = cluster.decodes[0], cluster.prefills[0]
        decode.pause_at = 5
        call, answer = cluster.call(ask(40)), Collected()
        await read(call, answer, 5)
        prefill.failures = [UnavailableError("scripted") for _ in range(10)]
        decode.break_streams()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(call, answer)
        assert isinstance(error_from_rpc(caught.value), UnavailableError)
        assert len(prefill.calls.entries) == 1 + 3


async def _one_paused_answer(cluster: FakeCluster) -> tuple[FakeDecode, FakeDecode, Any, Collected]:
    """An answer that has come to its fifth token: its decode worker, the other one, the call, what has come."""
    for decode in cluster.decodes:
        decode.pause_at = 5
    call, answer = cluster.call(ask(12)), Collected()
    await read(call, answer, 5)
    busy, other = sorted(cluster.decodes, key=lambda decode: -decode.live)
    other.pause_at = None
    return busy, other, call, answer


@pytest.mark.parametrize("repeats", [False, True])
async def test_a_broken_output_stream_is_resumed_where_it_was(repeats: bool) -> None:
    async with fake_cluster(decode=2) as cluster:
        busy, other, call, answer = await _one_paused_answer(cluster)
        busy.repeats = repeats
        before = await busy.attachments.wait()
        busy.break_streams(forget=False)
        resumed = await busy.attachments.wait(2)
        assert resumed.attachment > before.attachment
        assert [attached.next_position for attached in resumed.requests] == [5]
        busy.token_gate.open()
        await finish(call, answer)
        assert answer.token_ids == expected(12)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 1
        assert not other.reserves.entries


async def test_what_comes_while_the_output_stream_is_broken_is_read_later() -> None:
    async with fake_cluster(decode=2) as cluster:
        busy, _, call, answer = await _one_paused_answer(cluster)
        busy.stream_gate.close()
        busy.break_streams(forget=False)
        await busy.attachments.wait(2)
        busy.pause_at = None
        busy.token_gate.open()
        await settled(lambda: busy.live == 0)
        busy.stream_gate.open()
        await finish(call, answer)
        assert answer.token_ids == expected(12)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 1


async def test_a_request_that_the_worker_has_lost_goes_on_elsewhere() -> None:
    async with fake_cluster(decode=2) as cluster:
        busy, other, call, answer = await _one_paused_answer(cluster)
        busy.break_streams(forget=True)
        await finish(call, answer)
        assert answer.token_ids == expected(12)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 2
        assert other.reserves.entries[0].prior_output_tokens == 5


async def test_a_stream_that_stays_broken_is_given_up_and_the_request_is_no_longer_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_stream, "MAX_DETACHED_S", 0.2)
    async with fake_cluster(decode=2) as cluster:
        busy, _, call, answer = await _one_paused_answer(cluster)
        busy.stream_gate.close()
        busy.break_streams(forget=False)
        await finish(call, answer)
        assert answer.token_ids == expected(12)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 2
        aborted = await busy.aborts.wait()
        assert aborted.request_id == busy.reserves.entries[0].request_id
        busy.let_go()


async def test_an_abort_is_sent_again_until_the_worker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "ABORT_TIMEOUT_S", 0.1)
    async with fake_cluster() as cluster:
        decode = cluster.decodes[0]
        decode.pause_at = 4
        decode.abort_gate.close()
        call = cluster.call(ask(20))
        await read(call, Collected(), 4)
        call.cancel()
        tries = [await decode.abort_calls.wait(n) for n in (1, 2, 3)]
        assert len({tried.request_id for tried in tries}) == 1
        assert decode.live == 1
        decode.abort_gate.open()
        await settled(lambda: decode.live == 0)


async def test_the_timeout_ends_a_request_at_both_workers() -> None:
    async with fake_cluster() as cluster:
        cluster.decodes[0].pause_at = 3
        error = await cluster.error(ask(10, timeout={"seconds": 3}))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.reason == "DEADLINE_EXCEEDED"
        await cluster.decodes[0].aborts.wait()
        assert cluster.prefills[0].calls.entries[0].timeout.ToTimedelta().total_seconds() <= 3


async def test_the_calls_own_deadline_travels_too() -> None:
    async with fake_cluster() as cluster:
        cluster.prefills[0].first_token_gate.close()
        error = await cluster.error(ask(10), timeout=3)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (
            cluster.decodes[0].reserves.entries[0].timeout.ToTimedelta().total_seconds() < 4
        )  # gRPC rounds up
        await cluster.prefills[0].given_up.wait()
        await cluster.decodes[0].aborts.wait()


async def test_a_client_that_stops_reading_is_ended_by_its_deadline() -> None:
    async with fake_cluster() as cluster, slow_client(cluster) as client:
        cluster.decodes[0].padding = 100_000
        request = ask(60, timeout={"seconds": 3})
        slow, late = client.Generate(request, timeout=PATIENCE_S), Collected()
        late.add(await slow.read())
        await settled(lambda: cluster.coordinator.api.running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(slow, late)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("phase", ["reserving", "prefilling"])
async def test_calls_that_hang_on_a_lost_worker_are_made_again_elsewhere(phase: str) -> None:
    async with fake_cluster(prefill=2, decode=2, heartbeat_timeout_s=2.5) as cluster:
        reserving = phase == "reserving"
        for decode in cluster.decodes if reserving else ():
            decode.reserve_gate.close()
        for prefill in () if reserving else cluster.prefills:
            prefill.first_token_gate.close()
        reading = asyncio.create_task(cluster.answer(ask(5)))

        def stuck() -> list[FakeWorker]:
            """Whoever was asked. Calls that are open say nothing: a reservation is one for a moment in any phase."""
            if reserving:
                return [decode for decode in cluster.decodes if decode.reserves.entries]
            return [prefill for prefill in cluster.prefills if prefill.calls.entries]

        await settled(lambda: bool(stuck()))
        (lost,) = stuck()
        for worker in cluster.workers:
            if worker is not lost:
                worker.let_go()
        lost.fall_silent()
        answer = await asyncio.wait_for(reading, PATIENCE_S)
        assert answer.token_ids == expected(5)
        assert answer.done is not None
        assert answer.done.served_by.attempts == 2
        lost.let_go()


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
