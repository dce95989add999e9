"""The client against a scripted server: results, errors, cancellation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, closing
from typing import Any

import pytest

from splitserve.client import AsyncClient, ChatMessage, Client, Completion, Delta
from splitserve.client.request_builder import build_request
from splitserve.client.types import GenerateOptions
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.rpc.server import RpcServer
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.fake_inference import FakeInference, delta, done, serving
from tests.support.waiting import PATIENCE_S


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with serving(FakeInference()) as server:
        yield server


@pytest.fixture
async def client(fake: FakeInference) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fake.target, timeout_s=20) as connected:
        yield connected


async def test_a_stream_gives_deltas_and_then_the_whole(client: AsyncClient, fake: FakeInference) -> None:
    items = [item async for item in client.stream("hello", temperature=0.0, model="fake-1b")]
    assert items[:2] == [Delta(0, (11,), "It is "), Delta(1, (12, 13), "Paris ✓.")]
    whole = items[2]
    assert isinstance(whole, Completion)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("It is Paris ✓.", (11, 12, 13), "stop")
    assert (whole.seed, whole.request_id, whole.model) == (2**63 + 1, "req-1", "fake-1b")
    assert whole.usage.cached_prompt_tokens == 2
    assert whole.timings.transfer_bytes == 4096
    assert whole.served_by.decode_worker == "decode-0"
    assert fake.requests[0].text == "hello"
    assert fake.requests[0].sampling.HasField("temperature")
    assert 0 < fake.time_left_s[0] < 25  # gRPC rounds deadlines up on the wire


async def test_generate_gives_the_whole(client: AsyncClient, fake: FakeInference) -> None:
    turns = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")]
    whole = await client.generate(turns, timeout_s=60)
    assert whole.text == "It is Paris ✓."
    assert [turn.role for turn in fake.requests[0].chat.messages] == ["system", "user"]
    assert fake.time_left_s[0] < 65


async def test_logprobs_are_collected(client: AsyncClient, fake: FakeInference) -> None:
    entry = generation_pb2.TokenLogprob(
        token_id=5, logprob=-0.5, top=[generation_pb2.TopLogprob(token_id=6, logprob=-1)]
    )
    piece = generation_pb2.OutputDelta(token_ids=[5], text="x", logprobs=[entry])
    fake.script = [inference_pb2.GenerateResponse(delta=piece), done()]
    whole = await client.generate([1, 2], logprobs=1)
    assert whole.logprobs[0].top == ((6, -1.0),)
    assert list(fake.requests[0].token_ids.ids) == [1, 2]


async def test_leaving_a_stream_cancels_it_on_the_server(client: AsyncClient, fake: FakeInference) -> None:
    fake.script = [delta(0, [1], "a"), asyncio.Event()]
    async with aclosing(client.stream("hello")) as items:
        async for _ in items:
            break
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


async def test_leaving_a_stream_of_the_client_for_threads_cancels_it_as_well(fake: FakeInference) -> None:
    def read() -> Delta | Completion:
        with Client(fake.target) as client, closing(client.stream("hello")) as items:
            return next(items)

    fake.script = [delta(0, [1], "a"), asyncio.Event()]
    assert await asyncio.to_thread(read) == Delta(0, (1,), "a")
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


async def test_cancelling_a_call_cancels_it_on_the_server(client: AsyncClient, fake: FakeInference) -> None:
    fake.script = [delta(0, [1], "a"), asyncio.Event()]
    task = asyncio.create_task(client.generate("hello"))
    await asyncio.wait_for(fake.sent.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    "kind", [InvalidArgumentError, NotFoundError, UnavailableError, DeadlineExceededError]
)
async def test_errors_of_the_server_come_back_as_they_were(
    client: AsyncClient, fake: FakeInference, kind: type[SplitserveError]
) -> None:
    fake.script = [kind("what went wrong", reason="SOME_REASON", field="stop")]
    with pytest.raises(kind) as raised:
        await client.generate("hello")
    assert (raised.value.message, raised.value.reason) == ("what went wrong", "SOME_REASON")
    assert raised.value.field == "stop"


async def test_overload_comes_with_its_retry_hint(client: AsyncClient, fake: FakeInference) -> None:
    fake.script = [ResourceExhaustedError("full", retry_after_s=1.5)]
    with pytest.raises(ResourceExhaustedError) as raised:
        await client.generate("hello")
    assert raised.value.retry_after_s == 1.5


@pytest.mark.slow
async def test_a_deadline_is_told_with_its_length(client: AsyncClient, fake: FakeInference) -> None:
    fake.script = [asyncio.Event()]
    with pytest.raises(DeadlineExceededError, match=r"within 3 s"):
        await client.generate("hello", timeout_s=3)
    await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([delta(0, [1], "a"), delta(2, [3], "c"), done()], "STREAM_GAP"),
        ([delta(0, [1], "a"), delta(0, [1], "a"), done()], "STREAM_GAP"),
        ([delta(0, [1], "a")], "STREAM_BROKEN"),
        ([done(generation_pb2.FINISH_REASON_UNSPECIFIED)], "BAD_ANSWER"),
    ],
)
async def test_broken_answers_fail_closed(
    client: AsyncClient, fake: FakeInference, script: list[Any], reason: str
) -> None:
    fake.script = script
    with pytest.raises(SplitserveError) as raised:
        await client.generate("hello")
    assert raised.value.reason == reason


async def test_a_server_that_goes_away_midway() -> None:
    fake = FakeInference([delta(0, [1], "a"), asyncio.Event()])
    async with AsyncExitStack() as server:
        await server.enter_async_context(serving(fake))
        async with AsyncClient(fake.target) as client:
            task = asyncio.create_task(client.generate("hello"))
            await asyncio.wait_for(fake.sent.wait(), PATIENCE_S)
            await server.aclose()
            with pytest.raises(SplitserveError):
                await asyncio.wait_for(task, PATIENCE_S)


async def test_nobody_listens() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(
            UnavailableError, match=r"cannot reach .* at 127\.0\.0\.1:1 \(Connection refused\): is it running"
        ) as raised:
            await client.models()
    assert raised.value.reason == "UNREACHABLE"


async def test_another_grpc_server() -> None:
    server = RpcServer()
    port = await server.start("127.0.0.1", 0, [])
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(FailedPreconditionError, match="no splitserve coordinator"):
                await client.server_info()
    finally:
        await server.stop(0)


async def test_waiting_goes_on_after_an_answer_that_is_late(fake: FakeInference) -> None:
    class Late(AsyncClient):
        asked = 0

        async def models(self, *, timeout_s: float = 5.0) -> list[inference_pb2.ModelInfo]:
            self.asked += 1
            if self.asked == 1:
                raise DeadlineExceededError("late")
            return await super().models(timeout_s=timeout_s)

    async with Late(fake.target) as client:
        assert (await client.wait_ready(PATIENCE_S)).name == "fake-1b"
    assert client.asked == 2


@pytest.mark.slow
async def test_waiting_for_readiness(fake: FakeInference, client: AsyncClient) -> None:
    assert (await client.wait_ready(PATIENCE_S)).name == "fake-1b"
    with pytest.raises(DeadlineExceededError, match="'other' is not ready"):
        await client.wait_ready(3, model="other")
    async with AsyncClient("127.0.0.1:1") as nobody:
        with pytest.raises(DeadlineExceededError, match="cannot reach"):
            await nobody.wait_ready(3)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt.text"),
        ([], {}, "prompt"),
        ([-1], {}, "prompt.token_ids"),
        ("x", {"temperature": -1}, "sampling.temperature"),
        ("x", {"temperature": math.nan}, "sampling.temperature"),
        ("x", {"top_p": -0.5}, "sampling.top_p"),
        ("x", {"top_k": -1}, "sampling.top_k"),
        ("x", {"seed": 2**64}, "sampling.seed"),
        ("x", {"max_tokens": 0}, "stop.max_tokens"),
        ("x", {"stop_token_ids": [-1]}, "stop.stop_token_ids"),
        ("x", {"logit_bias": {1: 101.0}}, "sampling.logit_bias.bias"),
        ("x", {"allowed_token_ids": [-1]}, "sampling.allowed_token_ids"),
        ("x", {"allowed_token_ids": [1] * 1025}, "sampling.allowed_token_ids"),
        ("x", {"bad_words": ["x" * 257]}, "sampling.bad_words[0]"),
        ("x", {"bad_words": [" "]}, "sampling.bad_words[0]"),
        ("x", {"priority": 101}, "priority"),
        ("x", {"ttft_ms": 0}, "ttft_ms"),
        ("x", {"tpot_ms": math.nan}, "tpot_ms"),
        ("x", {"tpot_ms": 3.7e6}, "tpot_ms"),
    ],
)
def test_bad_values_name_their_field(prompt: Any, options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        build_request(prompt, options)
    assert raised.value.field == field
    assert field in raised.value.message


@pytest.mark.parametrize(("prompt", "options"), [("\udcff", {}), (["a"], {}), ("x", {"top_k": "many"})])
def test_what_the_wire_cannot_carry_is_refused(prompt: Any, options: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        build_request(prompt, options)


def test_all_options_reach_the_request() -> None:
    request = build_request(
        "x",
        {
            "stop": "end",
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 2,
            "logit_bias": {7: 1.5},
            "priority": -3,
            "ttft_ms": 500,
            "tpot_ms": None,
            "request_id": "r",
            "seed": 0,
            "logprobs": 0,
            "max_tokens": None,
        },
    )
    assert list(request.stop.stop_strings) == ["end"]
    assert request.stop.ignore_eos
    assert not request.stop.HasField("max_tokens")
    assert request.sampling.HasField("seed")
    assert request.sampling.HasField("logprobs")
    assert request.sampling.logit_bias[0].token_id == 7
    assert request.priority == -3
    assert (request.ttft_ms, request.HasField("tpot_ms")) == (500, False)


@pytest.mark.parametrize("target", ["", "host", "host:", ":1", "host:0", "host:70000", "a b:1", "::1:5"])
def test_bad_targets_are_refused(target: str) -> None:
    with pytest.raises(InvalidArgumentError, match="target"):
        AsyncClient(target)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf])
def test_bad_timeouts_are_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        AsyncClient("127.0.0.1:1", timeout_s=timeout_s)
