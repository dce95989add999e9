"""How both clients go on at another coordinator: what they ask for there, and when they give up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from splitserve.client import AsyncClient, Client, Completion, Delta
from splitserve.client.call_errors import CONNECTION_LOST, described
from splitserve.client.failover import GenerationSession, Targets
from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.fake_inference import FakeInference, delta, done, serving
from tests.support.waiting import PATIENCE_S

STARTED = inference_pb2.GenerationStart(request_id="req-1", seed=77, served_model="fake-1b-v2")
LOST = UnavailableError("the coordinator is shutting down", reason="DRAINING")


def first(token_ids: list[int], text: str) -> inference_pb2.GenerateResponse:
    """A delta with what is needed to go on."""
    response = delta(0, token_ids, text)
    response.started.CopyFrom(STARTED)
    return response


@asynccontextmanager
async def two(first_script: list[Any], second_script: list[Any]) -> AsyncIterator[list[FakeInference]]:
    async with AsyncExitStack() as stack:
        fakes = [FakeInference(first_script), FakeInference(second_script)]
        yield [await stack.enter_async_context(serving(fake)) for fake in fakes]


async def ask(kind: str, fakes: list[FakeInference], **options: Any) -> list[Delta | Completion]:
    """All items of a stream, from either client."""
    target = ",".join(fake.target for fake in fakes)
    if kind == "async":
        async with AsyncClient(target, timeout_s=20) as client:
            return [item async for item in client.stream("hello", **options)]

    def read() -> list[Delta | Completion]:
        with Client(target, timeout_s=20) as client:
            return list(client.stream("hello", **options))

    return await asyncio.to_thread(read)


both = pytest.mark.parametrize("kind", ["async", "threads"])


@both
async def test_the_next_coordinator_is_told_what_has_come(kind: str) -> None:
    async with two(
        [first([11], "It "), delta(1, [12], "is "), LOST], [delta(2, [13], "so"), done()]
    ) as fakes:
        items = await ask(kind, fakes, model="fake-1b", temperature=1.0, max_tokens=9)
    whole = items[-1]
    assert isinstance(whole, Completion)
    assert (whole.text, whole.token_ids) == ("It is so", (11, 12, 13))
    asked, resumed = fakes[0].requests[0], fakes[1].requests[0]
    assert not asked.HasField("resume")
    assert list(resumed.resume.token_ids) == [11, 12]
    assert resumed.resume.served_model == "fake-1b-v2"
    assert (resumed.request_id, resumed.sampling.seed) == ("req-1", 77)
    # All else is as it was.
    resumed.ClearField("resume")
    resumed.request_id = ""
    resumed.sampling.ClearField("seed")
    assert resumed == asked


@both
async def test_an_answer_that_lacks_only_its_last_message(kind: str) -> None:
    end = delta(1, [12], "is")
    end.delta.finish_reason = generation_pb2.FINISH_REASON_STOP
    async with two([first([11], "It "), end, LOST], [done()]) as fakes:
        whole = (await ask(kind, fakes))[-1]
    assert isinstance(whole, Completion)
    assert whole.text == "It is"
    assert fakes[1].requests[0].resume.finish_reason == generation_pb2.FINISH_REASON_STOP


@both
async def test_nothing_has_come_yet(kind: str) -> None:
    async with two([LOST], [first([11], "It"), done()]) as fakes:
        await ask(kind, fakes)
    assert not fakes[1].requests[0].HasField("resume")


@both
async def test_a_stream_that_ends_early_is_a_failure_as_well(kind: str) -> None:
    async with two([first([11], "It ")], [delta(1, [12], "is"), done()]) as fakes:
        assert isinstance((await ask(kind, fakes))[-1], Completion)


@both
@pytest.mark.parametrize(
    "error", [InvalidArgumentError("no"), ResourceExhaustedError("full"), DeadlineExceededError("late")]
)
async def test_other_errors_end_it(kind: str, error: SplitserveError) -> None:
    async with two([first([11], "It "), error], [done()]) as fakes:
        with pytest.raises(type(error)):
            await ask(kind, fakes)
    assert not fakes[1].requests


@both
async def test_all_of_them_fail(kind: str) -> None:
    async with two([first([11], "It "), LOST], [LOST]) as fakes:
        with pytest.raises(UnavailableError, match="shutting down"):
            await ask(kind, fakes)
    assert [len(fake.requests) for fake in fakes] == [1, 1]


@both
async def test_a_coordinator_that_says_nothing_to_go_on_with(kind: str) -> None:
    async with two([delta(0, [11], "It "), LOST], [done()]) as fakes:
        with pytest.raises(UnavailableError):
            await ask(kind, fakes)
    assert not fakes[1].requests


@both
async def test_a_coordinator_that_begins_anew_fails_closed(kind: str) -> None:
    async with two([first([11], "It "), LOST], [delta(0, [11], "It "), done()]) as fakes:
        with pytest.raises(SplitserveError) as caught:
            await ask(kind, fakes)
    assert caught.value.reason == "STREAM_GAP"


@pytest.mark.slow
@both
async def test_the_time_limit_is_one_for_all(kind: str) -> None:
    async with two([first([11], "It "), LOST], [asyncio.Event()]) as fakes:
        with pytest.raises(DeadlineExceededError, match="within 3 s"):
            await ask(kind, fakes, timeout_s=3)
    assert fakes[1].time_left_s[0] <= 3.5


@pytest.mark.slow
async def test_the_blocking_client_has_the_methods_of_the_other() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    async with serving(FakeInference()) as fake:

        def use() -> None:
            with Client(fake.target) as client:
                assert client.generate("hello").text == "It is Paris ✓."
                assert client.models()[0].name == "fake-1b"
                assert client.server_info().version == "0.1.0"
                assert client.wait_ready(PATIENCE_S).name == "fake-1b"
                with pytest.raises(DeadlineExceededError, match="'other' is not ready"):
                    client.wait_ready(3, model="other")
                for item in client.stream("hello"):
                    assert isinstance(item, Delta)
                    break

        await asyncio.to_thread(use)


async def test_leaving_a_blocking_stream_cancels_it() -> None:
    fake = FakeInference([delta(0, [1], "a"), asyncio.Event()])
    async with serving(fake):

        def leave() -> None:
            with Client(fake.target) as client:
                items = client.stream("hello")
                next(items)
                items.close()

        await asyncio.to_thread(leave)
        await asyncio.wait_for(fake.cancelled.wait(), PATIENCE_S)


def test_a_request_that_may_have_ended_a_coordinator_is_not_sent_to_the_next() -> None:
    request = inference_pb2.GenerateRequest(text="hello")
    request.sampling.grammar.regex = "a*"
    session = GenerationSession(request, Targets("127.0.0.1:1,127.0.0.1:2"), 10)
    with pytest.raises(UnavailableError, match="broke; no other is asked") as caught:
        session.failed(UnavailableError("the connection broke", reason=CONNECTION_LOST))
    assert caught.value.reason == CONNECTION_LOST


@pytest.mark.parametrize("reason", ["UNREACHABLE", "DRAINING", CONNECTION_LOST])
def test_a_request_without_a_grammar_goes_to_the_next(reason: str) -> None:
    session = GenerationSession(
        inference_pb2.GenerateRequest(text="hello"), Targets("127.0.0.1:1,127.0.0.1:2"), 10
    )
    session.failed(UnavailableError("no", reason=reason))
    assert session.failover.target == "127.0.0.1:2"


class Broken:
    """What gRPC raises."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> None:
        return None


NEVER_STOOD = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:7: "


@pytest.mark.parametrize(
    ("details", "reason", "words"),
    [
        ("Stream removed (Socket closed)", CONNECTION_LOST, "broke before the answer was complete"),
        ("Socket closed", CONNECTION_LOST, "broke before the answer was complete"),
        ("keepalive timeout", CONNECTION_LOST, "broke before the answer was complete"),
        ("ping timeout", CONNECTION_LOST, "broke before the answer was complete"),
        ("sendmsg:Broken pipe (32)", CONNECTION_LOST, "broke before the answer was complete"),
        (NEVER_STOOD + "recvmsg:Connection reset by peer (104)", "UNREACHABLE", "does it want TLS"),
        (NEVER_STOOD + "Socket closed", "UNREACHABLE", "does it want TLS"),
        (
            NEVER_STOOD + "Failed to connect to remote host: Connection refused",
            "UNREACHABLE",
            "is it running",
        ),
    ],
)
def test_tls_is_suspected_only_where_no_connection_stood(details: str, reason: str, words: str) -> None:
    error = described(Broken(details), "a:1", 10)
    assert error.reason == reason
    assert words in error.message
    assert ("TLS" in error.message) == ("TLS" in words)
