"""EngineThread where steps overlap: what happens in which order, and what is delivered when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from engine.core.engine import StepResult
from engine.core.engine_core import EngineCore
from engine.core.model_runner import PendingStep, SampledToken, ScheduledSequence
from splitserve.config.engine import EngineConfig
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import INSTANT, PROMPT, Script, request
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S
from worker.engine_thread import EngineThread


class Journal(Script):
    """Records when steps begin and end; `at` maps events to functions that are then called."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.events: list[str] = []
        self.at: dict[str, Callable[[], object]] = {}
        self.steps = 0

    def record(self, event: str) -> None:
        self.events.append(event)
        self.at.get(event, lambda: None)()

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        self.steps += 1
        self.record(f"begin {self.steps}")
        return super().begin(batch)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.record(f"wait {self.steps}")
        return super().execute(batch)


class Listener:
    """Records in the runner's journal which results arrive."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.results: list[StepResult] = []
        self.ended = threading.Event()

    def before_step(self, core: EngineCore, now: float) -> bool:
        return False

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        self.results.append(result)
        self.journal.record(f"deliver {len(self.results)}")
        if any(output.finish_reason is not None for output in result.outputs):
            self.ended.set()

    def close(self) -> None:
        self.journal.record("close")

    def tokens(self) -> list[int]:
        return [token for result in self.results for output in result.outputs for token in output.token_ids]


@asynccontextmanager
async def running(overlaps: bool = True) -> AsyncIterator[tuple[EngineThread, Listener]]:
    config = EngineConfig.model_validate({"num_blocks": 256, **INSTANT})
    listener = Listener(Journal(config))
    listener.journal.overlaps = overlaps
    thread = EngineThread(
        lambda: (EngineCore(listener.journal, config, ByteTokenizer()), listener), name="engine-under-test"
    )
    await thread.start()
    try:
        yield thread, listener
    finally:
        await thread.stop()


async def ended(listener: Listener) -> None:
    assert await asyncio.to_thread(listener.ended.wait, 10)


async def test_a_step_begins_before_the_previous_one_is_delivered() -> None:
    async with running() as (thread, listener):
        await thread.call(lambda core: core.add_request(request(max_tokens=3)))
        await ended(listener)
    assert listener.journal.events == [
        *("begin 1", "wait 1"),
        *("begin 2", "deliver 1", "wait 2"),
        *("begin 3", "deliver 2", "wait 3", "deliver 3"),
        "close",
    ]
    assert listener.tokens() == expected_tokens(PROMPT, 3)


@pytest.mark.parametrize("why", ["nothing overlaps", "a peer waits"])
async def test_outputs_are_delivered_before_anything_else_happens(why: str) -> None:
    async with running(overlaps=why == "a peer waits") as (thread, listener):
        for event in ("wait 1", "wait 2"):
            listener.journal.at[event] = lambda: thread.post(lambda *_: listener.journal.record("call"))
        second = threading.Event()
        listener.journal.at["call"] = lambda: listener.journal.steps == 2 and second.set()
        prompt, prefill_only = (bytes(600), True) if why == "a peer waits" else (PROMPT, False)
        asked = request(prompt=prompt, prefill_only=prefill_only, max_tokens=2)
        await thread.call(lambda core: core.add_request(asked))
        assert await asyncio.to_thread(second.wait, 10)
    assert listener.journal.events == [
        *("begin 1", "wait 1", "deliver 1", "call"),
        *("begin 2", "wait 2", "deliver 2", "call"),
        "close",
    ]


async def test_calls_run_between_steps_only() -> None:
    async with running() as (thread, listener):
        record = listener.journal.record
        for event in ("begin 2", "wait 2", "deliver 1"):
            listener.journal.at[event] = lambda: thread.post(lambda *_: record("call"))
        await thread.call(lambda core: core.add_request(request(max_tokens=3)))
        await ended(listener)
    events = listener.journal.events
    assert events[events.index("wait 2") + 1 : events.index("begin 3")] == ["call"] * 3


async def test_an_abort_before_the_next_step_drops_what_was_not_delivered() -> None:
    async with running() as (thread, listener):
        aborted = threading.Event()

        def abort(core: EngineCore) -> None:
            assert core.abort("r")
            aborted.set()

        listener.journal.at["wait 3"] = lambda: thread.post(abort)
        await thread.call(lambda core: core.add_request(request()))
        assert await asyncio.to_thread(aborted.wait, 10)
        # The result of the third step is empty, but it is delivered although no step follows.
        await thread.call(lambda *_: None)
        await thread.call(lambda *_: None)
        assert listener.journal.events[-2:] == ["wait 3", "deliver 3"]
    assert listener.tokens() == expected_tokens(PROMPT, 2)


async def test_stopping_delivers_the_pending_result() -> None:
    async with running() as (thread, listener):
        stopping_ = asyncio.Event()
        loop = asyncio.get_running_loop()

        def at_step() -> None:
            asyncio.run_coroutine_threadsafe(thread.stop(), loop)
            # Holds the step until the stop is queued behind it.
            while thread._calls.empty():
                pass
            loop.call_soon_threadsafe(stopping_.set)

        listener.journal.at["wait 5"] = at_step
        await thread.call(lambda core: core.add_request(request(max_tokens=50)))
        await stopping_.wait()
        await thread.stop()
    steps = listener.journal.steps
    assert listener.journal.events[-2:] == [f"deliver {steps}", "close"]
    assert listener.tokens() == expected_tokens(PROMPT, steps)
    assert thread.died.exception() is None


@pytest.mark.parametrize("event", ["begin 3", "wait 3", "a call", "deliver 2"])
async def test_what_was_computed_is_delivered_before_the_thread_dies(event: str) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async with running() as (thread, listener):
        if event == "a call":
            listener.journal.at["wait 2"] = lambda: thread.post(fail)
        else:
            listener.journal.at[event] = fail
        await thread.call(lambda core: core.add_request(request()))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await asyncio.wait_for(asyncio.shield(thread.died), PATIENCE_S)
    assert listener.tokens() == expected_tokens(PROMPT, 2)
    assert listener.journal.events[-1] == "close"


async def test_delivering_counts_as_between_steps_and_computing_as_a_step() -> None:
    """So the watchdog knows a listener that hangs from a device that does."""
    doing: dict[str, str] = {}
    async with running() as (thread, listener):
        for event in ("begin 2", "deliver 1", "wait 2"):

            def look(event: str = event) -> None:
                activity = thread.activity()
                assert activity is not None
                doing[event] = activity.what

            listener.journal.at[event] = look
        await thread.call(lambda core: core.add_request(request(max_tokens=2)))
        await ended(listener)
    assert doing == {"begin 2": "in a step", "deliver 1": "between two steps", "wait 2": "in a step"}
