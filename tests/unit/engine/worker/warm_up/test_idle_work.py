"""What an engine does while nothing is in progress, and that it does it only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from engine.core.model_runner import StepShape
from engine.core.types import EngineLoad, RowsFailedError, SampledToken, ScheduledSequence
from engine.kv_cache.block_pool import BlockPool
from engine.runner.simulated_runner import SimulatedRunner
from engine.worker.engine_thread import Activity
from engine.worker.warm_up import idle_work
from engine.worker.warm_up.idle_work import IdleWork, use_idle_time
from splitserve.config.engine import EngineConfig
from splitserve.errors import UnavailableError
from tests.support.cluster.streams import eventually

BLOCKS = 12


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_work, "PEERS_S", 0.0)
    monkeypatch.setattr(idle_work, "QUIET_S", 0.01)


class Unprepared(SimulatedRunner):
    """Steps of `shapes` are not made yet; `pages` pieces of memory are left."""

    def __init__(self, shapes: Sequence[StepShape] = (), pages: int = 0) -> None:
        super().__init__(EngineConfig(kind="simulated", simulated_step_s=0.0, num_blocks=BLOCKS))
        self.shapes, self.pages = list(shapes), pages
        self.computed: list[list[tuple[int, int, tuple[int, ...]]]] = []
        self.fails = self.lent = False
        self.rests = 0

    def first_steps(self, max_step_tokens: int) -> Sequence[StepShape]:
        return [shape for shape in self.shapes if shape.decodes + sum(shape.chunks) <= max_step_tokens]

    def populate(self) -> bool:
        self.pages -= 1
        return self.pages >= 0

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        self.computed.append([(row.num_computed, row.num_new, tuple(row.block_ids)) for row in batch])
        if self.fails:
            raise RowsFailedError("NaN", (0,), reason="NUMERICS")
        found = super().execute(batch)
        self.shapes.pop(0)
        return found

    def is_lent(self) -> bool:
        return self.lent

    def rest(self) -> None:
        self.rests += 1


def work_of(runner: Unprepared, max_step_tokens: int = 64) -> tuple[IdleWork, BlockPool]:
    pool = BlockPool(BLOCKS)
    return IdleWork([runner], pool, max_step_tokens), pool


def pieces(work: IdleWork) -> int:
    count = 0
    while work.do_piece():
        count += 1
        assert count < 100
    return count


def test_steps_come_first_then_memory() -> None:
    runner = Unprepared([StepShape(0, (40,)), StepShape(2, (17, 17))], pages=3)
    work, pool = work_of(runner)
    assert pieces(work) == 2 + 3
    chunk, mixed = runner.computed
    assert [(computed, new) for computed, new, _ in chunk] == [(0, 40)]
    assert [(computed, new) for computed, new, _ in mixed] == [(24, 1), (24, 1), (0, 17), (0, 17)]
    used = [block for _, _, blocks in mixed for block in blocks]
    assert len(used) == len(set(used)) == 8, "each sequence has blocks of its own"
    assert pool.free == BLOCKS
    assert runner.rests == 2
    assert pieces(work) == 0


def test_a_step_that_prepares_nothing_is_not_tried_again() -> None:
    runner = Unprepared([StepShape(0, (8,))])
    runner.fails = True
    work, pool = work_of(runner)
    assert pieces(work) == 1
    assert len(runner.computed) == 1
    assert pool.free == BLOCKS


@pytest.mark.parametrize(
    ("shape", "max_step_tokens"),
    [(StepShape(0, (16 * BLOCKS + 1,)), 4096), (StepShape(0, (65,)), 64)],
    ids=["blocks", "step"],
)
def test_what_does_not_fit_is_left_out(shape: StepShape, max_step_tokens: int) -> None:
    runner = Unprepared([shape])
    work, pool = work_of(runner, max_step_tokens)
    pieces(work)
    assert not runner.computed
    assert pool.free == BLOCKS


class Core:
    def __init__(self) -> None:
        self.busy = False
        self.owned = 0

    def has_work(self) -> bool:
        return self.busy

    def load(self) -> EngineLoad:
        return EngineLoad(total_blocks=BLOCKS, free_blocks=BLOCKS - self.owned)


class Connector:
    at_rest = True
    asleep = False

    def require_awake(self) -> None:
        if self.asleep:
            raise UnavailableError("the worker sleeps", reason="SLEEPING")


class Thread:
    """An engine thread that runs each call at once."""

    def __init__(self) -> None:
        self.core, self.connector = Core(), Connector()
        self.calls = 0

    async def call(self, fn: Callable[..., bool | None], activity: Activity | None = None) -> bool | None:
        self.calls += 1
        await asyncio.sleep(0)
        return fn(cast(Any, self.core), cast(Any, self.connector))


def busy(thread: Thread, runner: Unprepared, how: str, now: bool) -> None:
    match how:
        case "a step":
            thread.core.busy = now
        case "a block has an owner":
            thread.core.owned = int(now)
        case "a transfer":
            thread.connector.at_rest = not now
        case "cores are lent":
            runner.lent = now


@pytest.mark.parametrize("how", ["a step", "a block has an owner", "a transfer", "cores are lent"])
async def test_nothing_is_done_while_something_is_in_progress(how: str) -> None:
    runner, thread = Unprepared([StepShape(0, (8,))], pages=2), Thread()
    work, _ = work_of(runner)
    busy(thread, runner, how, True)
    task = asyncio.create_task(use_idle_time(cast(Any, thread), work, asyncio.Event()))
    try:
        await eventually(lambda: thread.calls >= 2, "it looks again")
        assert not runner.computed
        busy(thread, runner, how, False)
        await eventually(lambda: runner.pages < 0, "all is done")
        assert len(runner.computed) == 1
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_worker_that_sleeps_goes_on_once_it_is_awake() -> None:
    runner, thread, more = Unprepared(pages=1), Thread(), asyncio.Event()
    work, _ = work_of(runner)
    thread.connector.asleep = True
    task = asyncio.create_task(use_idle_time(cast(Any, thread), work, more))
    try:
        await eventually(lambda: thread.calls == 1, "it has looked")
        assert runner.pages == 1
        thread.connector.asleep = False
        more.set()
        await eventually(lambda: runner.pages < 0, "the memory is populated")
        calls = thread.calls
        runner.pages = 2  # it has slept again, and lost them
        more.set()
        await eventually(lambda: runner.pages < 0, "and again")
        assert thread.calls == calls + 4, "a look, two pieces, and none left"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
