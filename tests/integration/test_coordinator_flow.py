"""The coordinator as one process sees it: real gRPC, scripted workers, every way a request can go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coordinator.service import Coordinator, running_coordinator
from splitserve.config import CoordinatorConfig
from splitserve.errors import ResourceExhaustedError, SplitserveError, TransferError, UnavailableError
from splitserve.rpc import error_from_rpc, make_channel
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes.fake_workers import FIRST_TOKEN, FakeDecode, FakePrefill, FakeWorker, settled
from tests.fakes.word_tokenizer import load_word_tokenizer

pytestmark = pytest.mark.timeout(30)


class FakeCluster:
    """A coordinator with its fake workers, and a client."""

    def __init__(self, coordinator: Coordinator, channel: grpc.aio.Channel) -> None:
        self.coordinator = coordinator
        self.address = f"127.0.0.1:{coordinator.port}"
        self.client = InferenceServiceStub(channel)
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    def decode_of(self, agent_id: str) -> FakeDecode:
        return next(worker for worker in self.decodes if worker.agent_id == agent_id)

    async def add_prefill(self, name: str, **registered: Any) -> FakePrefill:
        worker = FakePrefill(name, self.address, self.decode_of, **registered)
        self.prefills.append(worker)
        await worker.start()
        return worker

    async def add_decode(self, name: str, **registered: Any) -> FakeDecode:
        worker = FakeDecode(name, self.address, **registered)
        self.decodes.append(worker)
        await worker.start()
        return worker

    async def all_ready(self) -> None:
        def ready() -> bool:
            snapshot = self.coordinator.registry.snapshot()
            pairs = [
                p.reaches(d) for p in snapshot.workers for d in snapshot.workers if (p.pool, d.pool) == POOLS
            ]
            return (
                len(snapshot.workers) == len(self.workers)
                and all(pairs)
                and all(w.accepts for w in snapshot.workers)
            )

        await settled(ready)

    def call(self, request: inference_pb2.GenerateRequest | None = None, timeout: float = 20) -> Any:
        return self.client.Generate(request or ask(), timeout=timeout)

    async def answer(self, request: inference_pb2.GenerateRequest | None = None) -> Collected:
        return await collect(self.call(request))

    async def error(self, request: inference_pb2.GenerateRequest, timeout: float = 20) -> SplitserveError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(self.call(request, timeout))
        return error_from_rpc(caught.value)


class Collected:
    """An answer, checked for gaps and duplicates as it came in."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.done: inference_pb2.GenerationDone | None = None
        self.deltas: list[generation_pb2.OutputDelta] = []

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert self.done is None
        if response.HasField("done"):
            self.done = response.done
            return
        assert response.delta.first_position == len(self.token_ids)
        self.token_ids.extend(response.delta.token_ids)
        self.text += response.delta.text
        self.deltas.append(response.delta)


POOLS = ("prefill", "decode")


def ask(max_tokens: int = 6, text: str = "w1 w2 w3", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text=text, stop=generation_pb2.StopParams(max_tokens=max_tokens), **fields
    )


def expected(count: int) -> list[int]:
    return list(range(FIRST_TOKEN, FIRST_TOKEN + count))


async def collect(call: Any) -> Collected:
    return await finish(call, Collected())


async def finish(call: Any, answer: Collected) -> Collected:
    """Reads to the end. (gRPC lets nobody mix `read` and iteration on one call.)"""
    while (response := await call.read()) is not grpc.aio.EOF:
        answer.add(response)
    return answer


async def read(call: Any, answer: Collected, tokens: int) -> None:
    """Reads on until the answer has so many tokens."""
    while len(answer.token_ids) < tokens:
        answer.add(await call.read())


@asynccontextmanager
async def fake_cluster(prefill: int = 1, decode: int = 1, **config: Any) -> AsyncIterator[FakeCluster]:
    before = asyncio.all_tasks()
    settings = CoordinatorConfig(**({"grpc_port": 0, "no_worker_wait_s": 0.5, "drain_s": 5.0} | config))
    async with (
        running_coordinator(settings, load=load_word_tokenizer) as coordinator,
        make_channel(f"127.0.0.1:{coordinator.port}") as channel,
    ):
        cluster = FakeCluster(coordinator, channel)
        try:
            for number in range(decode):
                await cluster.add_decode(f"d{number}")
            for number in range(prefill):
                await cluster.add_prefill(f"p{number}")
            await cluster.all_ready()
            yield cluster
            await settled(lambda: coordinator.inference.running == 0 and coordinator.background.count == 0)
            await settled(lambda: all(worker.open_rpcs.count == 0 for worker in cluster.workers))
        finally:
            for worker in cluster.workers:
                await worker.stop()
    await settled(lambda: not asyncio.all_tasks() - before)


async def test_text_goes_through_both_pools() -> None:
    async with fake_cluster() as cluster:
        answer = await cluster.answer(ask(6, request_id="my-id"))
        assert answer.token_ids == expected(6)
        assert answer.text == "".join(f" w{token}" for token in expected(6))
        assert [d.finish_reason for d in answer.deltas if d.finish_reason] == [
            generation_pb2.FINISH_REASON_LENGTH
        ]
        done = answer.done
        assert done is not None
        assert (done.finish_reason, done.request_id) == (generation_pb2.FINISH_REASON_LENGTH, "my-id")
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 6)
        served = done.served_by
        assert (served.prefill_worker, served.decode_worker, served.transport) == ("p0", "d0", "memory")
        assert served.attempts == 1
        timings = done.timings
        assert (timings.prefill_ms, timings.transfer_ms, timings.decode_admit_ms) == (5.0, 3.0, 2.0)
        assert timings.transfer_bytes == 8192
        assert timings.queue_ms >= timings.reserve_ms > 0
        assert timings.ttft_ms > 0
        (call,) = cluster.prefills[0].calls.entries
        assert list(call.token_ids) == [1, 2, 3]
        assert call.sampling.seed == done.seed
        assert (call.sampling.temperature, call.sampling.top_p) == (1.0, 1.0)
        assert cluster.decodes[0].aborts.entries == []


async def test_chat_and_token_ids() -> None:
    async with fake_cluster() as cluster:
        chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="w7 w8")])
        await cluster.answer(inference_pb2.GenerateRequest(chat=chat, stop={"max_tokens": 2}))
        ids = inference_pb2.TokenIds(ids=[9, 10])
        await cluster.answer(inference_pb2.GenerateRequest(token_ids=ids, stop={"max_tokens": 2}))
        prompts = [list(call.token_ids) for call in cluster.prefills[0].calls.entries]
        assert prompts == [[2, 7, 8, 3], [9, 10]]


async def test_max_tokens_default_to_the_rest_of_the_context() -> None:
    async with fake_cluster() as cluster:
        answer = await cluster.answer(inference_pb2.GenerateRequest(text="w1 w2 w3"))
        assert answer.token_ids == expected(61)


async def test_one_token_needs_no_decode_worker() -> None:
    async with fake_cluster(decode=0) as cluster:
        answer = await cluster.answer(ask(1))
        assert answer.token_ids == expected(1)
        assert answer.done is not None
        assert answer.done.served_by.decode_worker == ""
        assert not cluster.prefills[0].calls.entries[0].HasField("ticket")


async def test_an_answer_that_ends_with_its_first_token_frees_the_reservation() -> None:
    async with fake_cluster() as cluster:
        cluster.prefills[0].stop_at = 0
        answer = await cluster.answer(ask(6))
        assert answer.token_ids == expected(1)
        assert answer.done is not None
        assert answer.done.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert answer.done.served_by.decode_worker == ""
        aborted = await cluster.decodes[0].aborts.wait()
        assert aborted.request_id == cluster.prefills[0].calls.entries[0].request_id
        assert not aborted.never_written


async def test_decode_output_that_comes_first_waits_for_the_first_token() -> None:
    async with fake_cluster() as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        prefill.decode_goes_first = True
        prefill.first_token_gate.close()
        reading = asyncio.create_task(cluster.answer(ask(6)))
        await decode.sent.wait(5)
        prefill.first_token_gate.open()
        assert (await reading).token_ids == expected(6)


async def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    async with fake_cluster() as cluster:
        cluster.prefills[0].handoff_gate.close()
        call, answer = cluster.call(ask(6)), Collected()
        await read(call, answer, 1)
        assert cluster.decodes[0].sent.entries == []
        cluster.prefills[0].handoff_gate.open()
        await read(call, answer, 6)
        call.cancel()


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
        assert aborted.never_written == (phase == "reserving")
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
        assert not aborted.never_written


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
        error = await cluster.error(ask(), timeout=5)
        assert isinstance(error, UnavailableError)
        assert error.reason == "NO_WORKER"
        assert named in error.message
        assert error.retry_after_s is not None


async def test_a_request_waits_for_a_pool_that_comes_in_time() -> None:
    async with fake_cluster(decode=0, no_worker_wait_s=10.0) as cluster:
        reading = asyncio.create_task(cluster.answer(ask(4)))
        await settled(lambda: cluster.coordinator.inference.running == 1)
        await cluster.add_decode("late")
        assert (await reading).token_ids == expected(4)


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (ask(model="other"), grpc.StatusCode.NOT_FOUND, "model"),
        (ask(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        (ask(text="   "), grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        (ask(text="w1 " * 64), grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        (ask(62), grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens"),
        (ask(timeout={"seconds": 601}), grpc.StatusCode.INVALID_ARGUMENT, "timeout"),
        (
            ask(sampling={"temperature": float("nan")}),
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
    ],
)
async def test_wrong_requests_name_the_field(
    request_: inference_pb2.GenerateRequest, code: grpc.StatusCode, field: str
) -> None:
    async with fake_cluster() as cluster:
        error = await cluster.error(request_)
        assert (error.code, error.field) == (code, field)
        assert cluster.decodes[0].reserves.entries == []


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


async def test_a_slow_reader_gets_everything_and_holds_up_nobody() -> None:
    async with fake_cluster() as cluster:
        slow = cluster.call(ask(40, request_id="slow"))
        late = Collected()
        late.add(await slow.read())
        others = [await cluster.answer(ask(20)) for _ in range(5)]
        assert all(answer.token_ids == expected(20) for answer in others)
        await settled(lambda: cluster.decodes[0].live == 0)
        await finish(slow, late)
        assert late.token_ids == expected(40)


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
    async with fake_cluster() as cluster:
        cluster.decodes[0].pause_at = 3
        call, answer = cluster.call(ask(8)), Collected()
        await read(call, answer, 3)
        draining = asyncio.create_task(cluster.coordinator.drain())
        await settled(lambda: cluster.coordinator.inference.draining)
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
        assert [(w.worker_id, w.pool, w.state) for w in info.workers] == [
            ("d0", "decode", "ready"),
            ("p0", "prefill", "ready"),
        ]
        assert (info.running_requests, info.background_tasks) == (0, 0)
        models = (await cluster.client.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(m.name, m.context_tokens, m.has_chat_template, m.ready) for m in models] == [
            ("words", 64, True, True)
        ]


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
