"""EngineThread: calls between steps, sleep, errors, stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine.core.engine import RequestOutput, StepResult
from engine.core.engine_core import EngineCore
from engine.runner.simulated_runner import SimulatedRunner
from splitserve.config.engine import EngineConfig
from splitserve.errors import BrokenInvariantError, NotFoundError, UnavailableError
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import INSTANT, PROMPT, request
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S
from worker.engine_thread import EngineThread


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"], autouse=True)
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRunner, "overlaps", request.param)


class Recorder:
    """A listener that records what happened and on which thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.threads: set[str] = set()
        self.polls = 0
        self.polling = False
        self.closed = 0
        self.on_poll: Callable[[EngineCore], None] = lambda _core: None

    def before_step(self, core: EngineCore, now: float) -> bool:
        self.polls += 1
        self.threads.add(threading.current_thread().name)
        self.on_poll(core)
        return self.polling

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        for output in result.outputs:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, output)

    def close(self) -> None:
        self.closed += 1
        self.threads.add(threading.current_thread().name)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[EngineThread, Recorder]]:
    recorder = Recorder(asyncio.get_running_loop())

    def build() -> tuple[EngineCore, Recorder]:
        recorder.threads.add(threading.current_thread().name)
        config = EngineConfig.model_validate({"num_blocks": 256, **INSTANT})
        return EngineCore(SimulatedRunner(config), config, ByteTokenizer()), recorder

    thread = EngineThread(build, name="engine-under-test")
    await thread.start()
    try:
        yield thread, recorder
    finally:
        await thread.stop()
    assert recorder.closed == 1
    assert recorder.threads == {"engine-under-test"}


async def test_requests_run_and_outputs_come_back() -> None:
    async with running() as (thread, recorder):
        await thread.call(lambda core: core.add_request(request(max_tokens=5)))
        tokens = [token for _ in range(5) for token in (await recorder.outputs.get()).token_ids]
        assert tokens == expected_tokens(PROMPT, 5)
    assert thread.died.done()
    assert thread.died.exception() is None


async def test_calls_return_and_raise() -> None:
    async with running() as (thread, _):
        assert await thread.call(lambda core: core.load().total_blocks) == 256
        with pytest.raises(NotFoundError):
            await thread.call(lambda core: core.admit(1, 65))
        assert await thread.call(lambda *_: threading.current_thread().name) == "engine-under-test"


async def test_an_idle_thread_sleeps_and_responds_at_once() -> None:
    async with running() as (thread, recorder):
        await thread.call(lambda *_: None)
        before = recorder.polls
        delays = []
        for _ in range(50):
            began = time.perf_counter()
            await thread.call(lambda *_: None)
            delays.append(time.perf_counter() - began)
        assert recorder.polls - before <= 51
        assert sorted(delays)[5] < 0.05  # woken, not at the next look: which of a few had a core at once


async def test_a_listener_is_polled_while_it_wants_to_be() -> None:
    async with running() as (thread, recorder):
        seen = asyncio.Event()

        def on_poll(_core: EngineCore) -> None:
            if recorder.polls > 20:
                recorder.polling = False
                recorder.loop.call_soon_threadsafe(seen.set)

        recorder.on_poll = on_poll
        recorder.polling = True
        await thread.call(lambda *_: None)
        await asyncio.wait_for(seen.wait(), PATIENCE_S)


async def test_a_deadline_wakes_an_idle_thread() -> None:
    async with running() as (thread, recorder):
        waiting = request(deadline_s=time.monotonic() + 0.05)
        assert await thread.call(lambda core: core.reserve(waiting, 1)) is not None
        output = await asyncio.wait_for(recorder.outputs.get(), PATIENCE_S)
        assert output.failure is not None
        assert output.failure[0] == "DEADLINE_EXCEEDED"
        await thread.call(lambda core: core.release_writer(1))


async def test_a_cancelled_call_leaves_the_thread_alone() -> None:
    async with running() as (thread, _):
        entered, leave, ran = threading.Event(), threading.Event(), []

        def block(*_: object) -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        blocking = asyncio.create_task(thread.call(block))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        queued = asyncio.create_task(thread.call(lambda *_: ran.append(1)))
        await asyncio.sleep(0)
        for task in (blocking, queued):
            task.cancel()
        await asyncio.gather(blocking, queued, return_exceptions=True)
        assert blocking.cancelled()
        assert queued.cancelled()
        leave.set()
        await thread.call(lambda *_: ran.append(2))
        assert ran == [2]


async def test_all_queued_calls_run_before_the_next_step() -> None:
    async with running() as (thread, recorder):
        entered, leave = threading.Event(), threading.Event()
        polls: list[int] = []

        def block(*_: object) -> None:
            entered.set()
            leave.wait(PATIENCE_S)

        thread.post(block)
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        for _ in range(10):
            thread.post(lambda *_: polls.append(recorder.polls))
        leave.set()
        await thread.call(lambda *_: None)
        assert len(polls) == 10
        assert len(set(polls)) <= 2


async def test_an_error_of_the_factory_is_raised_by_start() -> None:
    def build() -> tuple[EngineCore, Recorder]:
        raise UnavailableError("no weights")

    thread = EngineThread(build, name="engine-under-test")
    with pytest.raises(UnavailableError, match="no weights"):
        await thread.start()
    with pytest.raises(UnavailableError):
        await thread.call(lambda *_: None)
    await thread.stop()


async def test_a_loop_that_dies_reports_it_and_refuses_calls() -> None:
    async with running() as (thread, _):

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        thread.post(fail)
        late = asyncio.create_task(thread.call(lambda *_: None))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(asyncio.shield(thread.died), PATIENCE_S)
        await asyncio.gather(late, return_exceptions=True)
        with pytest.raises(UnavailableError) as refused:
            await thread.call(lambda *_: None)
        assert refused.value.reason == "ENGINE_STOPPED"
        thread.post(fail)


async def test_only_a_broken_invariant_in_a_call_ends_the_thread() -> None:
    async with running() as (thread, _):

        def fail(error: BaseException) -> Callable[[EngineCore, Recorder], None]:
            def call(*_: object) -> None:
                raise error

            return call

        for error in (ZeroDivisionError("a bug"), AssertionError("of a library"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                await thread.call(fail(error))
        assert await thread.call(lambda core: core.load().total_blocks) == 256
        with pytest.raises(BrokenInvariantError):
            await thread.call(fail(BrokenInvariantError("freed twice")))
        with pytest.raises(BrokenInvariantError, match="freed twice"):
            await asyncio.wait_for(asyncio.shield(thread.died), PATIENCE_S)


async def test_stop_runs_what_was_queued_and_can_be_repeated() -> None:
    async with running() as (thread, _):
        ran: list[int] = []
        thread.post(lambda *_: ran.append(1))
        await thread.stop()
        assert ran == [1]
        await thread.stop()
    await EngineThread(lambda: pytest.fail("not started"), name="never").stop()
