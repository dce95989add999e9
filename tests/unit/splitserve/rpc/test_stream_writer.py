"""A stream's writes without a task: one at a time, those of tasks after them, and what fails is not lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from splitserve.rpc import server
from splitserve.rpc.carried_calls import BATCH_BYTES, BATCH_ITEMS, BatchWriter
from splitserve.rpc.server import StreamWriter, write_whole

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


class Item(str):
    """A message of a batch."""

    def __new__(cls, text: str, size: int = 1) -> Item:
        made = super().__new__(cls, text)
        made.size = size
        return made

    size: int

    def ByteSize(self) -> int:
        return self.size


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
    monkeypatch.setattr(server, "WRITE_GRACE_S", 0.01)
    await writer.settle()  # not for ever
    assert not writer.is_ready


@contextmanager
def unseen_errors() -> Iterator[list[str]]:
    """What asyncio reports that nobody has seen, in a loop that goes on."""
    loop, seen = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, told: seen.append(told["message"]))
    try:
        yield seen
    finally:
        loop.set_exception_handler(None)


@pytest.mark.parametrize("fails_after_s", [0.0, 0.2], ids=["in the grace", "after it"])
async def test_a_write_that_fails_once_its_task_was_cancelled_is_not_reported(
    fails_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_GRACE_S", 0.1)
    with unseen_errors() as unseen:
        wire = Wire()
        task = asyncio.create_task(write_whole(wire, "a"))  # type: ignore[arg-type]
        await turns()
        task.cancel()
        await asyncio.sleep(fails_after_s)
        wire.done.pop().set_exception(RuntimeError("the client has gone"))
        await asyncio.wait([task])
        assert task.cancelled()
        del task, wire
        await turns()
        gc.collect()
        assert not unseen


@pytest.mark.parametrize("how", ["whole", "writer", "begun"])
async def test_a_client_that_leaves_during_a_write_is_no_error(how: str) -> None:
    """A real server, whose client does not read: a message waits for it to."""
    began = asyncio.Event()

    async def serve(_: bytes, context: Any) -> None:
        writer = StreamWriter(context.write)
        try:
            for _ in range(64):
                if how == "whole":
                    await write_whole(context, b"x" * 2**20)
                elif how == "writer" or not writer.is_ready:
                    await writer.write(b"x" * 2**20)
                else:
                    writer.begin(b"x" * 2**20)
                began.set()
        finally:
            await writer.settle()

    server, ended = grpc.aio.server(), asyncio.Event()

    async def watched(request: bytes, context: Any) -> None:
        try:
            await serve(request, context)
        finally:
            ended.set()

    handlers = {"Many": grpc.unary_stream_rpc_method_handler(watched)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Writes", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with unseen_errors() as unseen:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/test.Writes/Many")(b"")
            await began.wait()
            await asyncio.sleep(0.1)  # the next write waits for the client
            call.cancel()
            await ended.wait()
        await server.stop(None)
        await turns()
        gc.collect()
        assert not unseen


async def test_what_comes_in_one_turn_or_during_a_write_leaves_in_one_message() -> None:
    wire = Wire()
    writer: BatchWriter[Item] = BatchWriter(wire.write, "".join)
    for name in "ab":
        writer.put(Item(name))
    await turns()
    assert wire.taken == ["ab"]
    for name in "cd":
        writer.put(Item(name))
        await turns()
    assert wire.taken == ["ab"]
    settling = asyncio.create_task(writer.settle())
    for done in (0, 1):
        wire.done[done].set_result(None)
        await turns()
    assert wire.taken == ["ab", "cd"]
    await settling
    for name in "ef":
        writer.put(Item(name, BATCH_BYTES))
    await turns()
    wire.done[2].set_result(None)
    await turns()
    assert wire.taken == ["ab", "cd", "e", "f"]


async def test_a_failed_write_ends_a_batch_writer() -> None:
    wire = Wire()
    writer: BatchWriter[Item] = BatchWriter(wire.write, "".join)
    writer.put(Item("a"))
    await turns()
    wire.done[0].set_exception(OSError("broken"))
    await turns()
    writer.put(Item("b"))
    await writer.settle()
    assert wire.taken == ["a"]


async def test_a_batch_waits_for_others_as_long_as_it_is_told() -> None:
    wire, wait_s = Wire(), 0.2
    writer: BatchWriter[Item] = BatchWriter(wire.write, "".join, lambda: wait_s)
    writer.put(Item("a"))
    await turns()
    writer.put(Item("b"))
    assert wire.taken == []
    while not wire.taken:
        await turns()
    assert wire.taken == ["ab"]
    writer.put(Item("c"))
    wire.done[0].set_result(None)
    await turns()
    writer.put(Item("d"))
    assert wire.taken == ["ab"], "what came during a write waits, too"
    while len(wire.taken) < 2:
        await turns()
    assert wire.taken == ["ab", "cd"]
    wait_s = 0.0
    wire.done[1].set_result(None)
    await turns()
    writer.put(Item("e"))
    await turns()
    assert wire.taken == ["ab", "cd", "e"], "and nothing waits where nothing is to"


async def test_what_a_batch_has_no_room_for_waits_no_longer() -> None:
    wire = Wire()
    writer: BatchWriter[Item] = BatchWriter(wire.write, "".join, lambda: 0.001)
    for _ in range(2 * BATCH_ITEMS + 1):
        writer.put(Item("a"))
    while not wire.taken:
        await turns()
    for batches in (1, 2):
        assert len(wire.taken) == batches
        wire.done[batches - 1].set_result(None)
        await turns()
    assert list(map(len, wire.taken)) == [BATCH_ITEMS, BATCH_ITEMS, 1], "at once, without a look at the clock"


async def test_a_write_that_fails_while_a_batch_waits_ends_it() -> None:
    wire = Wire()
    writer: BatchWriter[Item] = BatchWriter(wire.write, "".join, lambda: 0.001)
    writer.put(Item("a"))
    while not wire.taken:
        await turns()
    writer.put(Item("b"))
    wire.done[0].set_exception(OSError("broken"))
    await turns()
    writer.put(Item("c"))
    async with asyncio.timeout(1):
        await writer.settle()
    assert writer.held == 0
    assert writer.has_failed
    assert wire.taken == ["a"]
