"""Output that is sent without waking the task that waits for it: what goes that way, and what the task still gets."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.attempt import Attempt, AttemptState
from coordinator.request_events import RequestEvents
from coordinator.workers.client import BackgroundTasks
from coordinator.workers.output_stream import WorkerFailed
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import TokenDelta
from splitserve.logs import log_context, log_event
from splitserve.v1 import inference_pb2
from tests.unit.coordinator.test_attempt import ADMITTED, HANDOFF, LENGTH, LOST, Rig, first, output

pytestmark = pytest.mark.timeout(10)


class Client:
    """An Output that keeps positions; `reads` is whether it takes more."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.reads = True
        self.error: Exception | None = None

    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        raise AssertionError("nothing is waited for")

    async def end(self, done: inference_pb2.GenerationDone) -> None:
        raise AssertionError("nothing is waited for")

    def takes_now(self) -> bool:
        return self.reads

    def send_now(self, delta: TokenDelta) -> None:
        if self.error is not None:
            raise self.error
        self.got += range(delta.first_position, delta.first_position + len(delta.token_ids))


class Sent:
    """A RequestControl that counts tokens, and logs each report of them."""

    def __init__(self) -> None:
        self.tokens = 0

    def output_sent(self, tokens: int) -> None:
        self.tokens += tokens
        log_event("observed")

    def decoded(self) -> None:
        """The end of decode's part is not recorded."""

    def ended(self, error: BaseException | None) -> None:
        """The end is not recorded."""


class Streaming:
    """A rig whose first token was taken, and a task that waits for the next delta."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.client, self.sent = rig, Client(), Sent()
        rig.events = RequestEvents(rig.events.state)
        rig.events.control = self.sent
        workers = rig.attempt._prefill, rig.attempt._decode
        rig.attempt.close()
        self.attempt = rig.attempt = Attempt(
            rig.events, *workers, rig.attempt._background, output=self.client
        )

    async def begin(self) -> None:
        await self.rig.start()
        self.rig.prefill.say(first())
        await self.take()
        self.rig.prefill.say(HANDOFF)
        self.rig.decode.say(ADMITTED)
        self.waiting = asyncio.create_task(self.take())
        await self.blocked()

    async def take(self) -> list[int]:
        """As the request flow does."""
        delta = await self.attempt.next_delta()
        if delta is None:
            return []
        self.rig.events.sent(delta, time.monotonic())
        return list(range(delta.first_position, delta.first_position + len(delta.token_ids)))

    async def blocked(self) -> None:
        """The task has nothing more to do."""
        for _ in range(5):
            await asyncio.sleep(0)
        assert not self.waiting.done()


@asynccontextmanager
async def streaming() -> AsyncIterator[Streaming]:
    background = BackgroundTasks()
    with log_context(request_id="r"):
        one = Streaming(Rig(background))
        await one.begin()
    yield one
    one.waiting.cancel()
    await asyncio.wait([one.waiting])
    one.attempt.close()
    await background.close(1.0)


async def test_tokens_of_decode_are_sent_while_the_task_waits() -> None:
    async with streaming() as one:
        for position in (1, 2, 3):
            one.rig.decode.say(output(position))
        assert one.client.got == [1, 2, 3]
        await one.blocked()
        assert len(one.rig.events.state.token_ids) == 4
        one.rig.events.attempt_ended()
        assert one.sent.tokens == 4


async def test_the_last_token_is_the_tasks() -> None:
    async with streaming() as one:
        one.rig.decode.say(output(1))
        one.rig.decode.say(output(2, LENGTH))
        assert await one.waiting == [2]
        assert one.client.got == [1]
        assert one.attempt.state is AttemptState.FINISHED


async def test_a_client_that_does_not_read_is_waited_for_by_the_task() -> None:
    async with streaming() as one:
        one.rig.decode.say(output(1))
        one.client.reads = False
        one.rig.decode.say(output(2))
        one.rig.decode.say(output(3))
        assert one.client.got == [1]
        assert await one.waiting == [2, 3]
        one.client.reads = True
        one.rig.decode.say(output(4))
        assert one.client.got == [1], "while the task is writing, nothing goes past it"
        assert await one.take() == [4]


async def test_nothing_is_sent_once_the_request_is_cancelled() -> None:
    async with streaming() as one:
        one.waiting.cancel()
        one.rig.decode.say(output(1))
        await asyncio.wait([one.waiting])
        assert one.waiting.cancelled()
        assert (one.client.got, one.sent.tokens) == ([], 1)


async def test_a_failure_follows_the_tokens_before_it() -> None:
    async with streaming() as one:
        one.rig.decode.say(output(1))
        one.rig.decode.say(WorkerFailed(one.rig.decode.worker.key, LOST))
        with pytest.raises(SplitserveError, match="went away"):
            await one.waiting
        assert one.client.got == [1]
        assert one.rig.events.state.attempt.suspect == one.rig.decode.worker.key


@pytest.mark.parametrize("error", [RuntimeError("the socket"), None])
async def test_what_goes_wrong_fails_the_request_and_not_who_delivers(error: Exception | None) -> None:
    async with streaming() as one:
        one.client.error = error
        one.rig.decode.say(output(1 if error else 5))
        with pytest.raises(RuntimeError if error else SplitserveError, match=r"socket|is next"):
            await one.waiting


async def test_an_ended_attempt_is_no_garbage() -> None:
    async with streaming() as one:
        one.rig.decode.say(output(1))
        one.rig.decode.say(output(2, LENGTH))
        await one.waiting
    ended = weakref.ref(one.attempt)
    gc.disable()
    try:
        del one
        assert ended() is None
    finally:
        gc.enable()


async def test_what_observers_log_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="splitserve"):
        async with streaming() as one:
            caplog.clear()
            one.rig.decode.say(output(1))
            fields = [record.event_fields for record in caplog.records]  # type: ignore[attr-defined]
    assert fields == [{"request_id": "r"}]
