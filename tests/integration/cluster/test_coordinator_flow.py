"""The way of an answer through the coordinator, with scripted workers over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.cluster.fake_cluster import (
    Collected,
    ask,
    expected,
    fake_cluster,
    finish,
    read,
    slow_client,
)
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(30)


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
        assert (served.prefill_worker, served.decode_worker, served.transport) == ("p0", "d0", "nixl")
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
        ids = generation_pb2.TokenIds(ids=[9, 10])
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
        assert not aborted.no_writer


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


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (ask(model="other"), grpc.StatusCode.NOT_FOUND, "model"),
        (ask(text="   "), grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        (ask(text="w1 " * 64), grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
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


async def test_what_gathers_for_a_client_that_lags_comes_as_one() -> None:
    async with fake_cluster() as cluster, slow_client(cluster) as client:
        cluster.decodes[0].padding = 100_000
        slow, late = client.Generate(ask(60), timeout=PATIENCE_S), Collected()
        late.add(await slow.read())
        await settled(lambda: len(cluster.decodes[0].sent.entries) == 59)
        await finish(slow, late)
        assert late.token_ids == expected(60)
        assert len(late.deltas) < 60
        assert len(late.text) > 59 * 100_000
