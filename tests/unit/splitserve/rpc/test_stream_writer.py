"""A stream's writes without a task: one at a time, those of tasks after them, and what fails is not lost."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.rpc import writing
from splitserve.rpc.writing import StreamWriter

pytestmark = pytest.mark.timeout(10)


class Wire:
    """Takes messages like gRPC: at once, and says later that it is done."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.done: list[asyncio.Future[None]] = []

    async def write(self, message: str) -> None:
        assert all(done.done() for done in self.done), "gRPC allows one write at a time"
        self.taken.append(message)
        self.done.append(asyncio.get_running_loop().create_future())
        await self.done[-1]


async def turns() -> None:
    """Lets everything run that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_write_begins_at_once_and_the_next_may_follow_when_it_is_over() -> None:
    wire = Wire()
    writer = StreamWriter(wire.write)
    writer.begin("a")
    assert wire.taken == ["a"]
    assert not writer.is_ready
    wire.done[0].set_result(None)
    await turns()
    assert writer.is_ready
    writer.begin("b")
    assert wire.taken == ["a", "b"]


async def test_a_task_writes_after_what_is_in_progress() -> None:
    wire = Wire()
    writer = StreamWriter(wire.write)
    writer.begin("a")
    task = asyncio.create_task(writer.write("b"))
    await turns()
    assert wire.taken == ["a"]
    wire.done[0].set_result(None)
    await turns()
    assert wire.taken == ["a", "b"]
    wire.done[1].set_result(None)
    await task
    assert writer.is_ready


async def test_a_write_that_needs_no_wait_is_over_at_once() -> None:
    async def write(message: str) -> None:
        pass

    writer = StreamWriter(write)
    writer.begin("a")
    assert writer.is_ready


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
async def test_the_next_task_gets_what_a_write_has_raised(error: BaseException) -> None:
    wire = Wire()
    writer = StreamWriter(wire.write)
    writer.begin("a")
    if isinstance(error, asyncio.CancelledError):
        wire.done[0].cancel()
    else:
        wire.done[0].set_exception(error)
    await turns()
    assert not writer.is_ready
    with pytest.raises(type(error)):
        await writer.write("b")
    assert wire.taken == ["a"]


async def test_a_call_ends_after_its_write(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    writer = StreamWriter(wire.write)
    writer.begin("a")
    ending = asyncio.create_task(writer.settle())
    await turns()
    assert not ending.done()
    wire.done[0].set_result(None)
    await ending
    writer.begin("b")
    monkeypatch.setattr(writing, "WRITE_GRACE_S", 0.01)
    await writer.settle()  # not for ever
    assert not writer.is_ready
