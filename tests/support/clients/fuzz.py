"""Random protobuf messages and bytes, from half valid to garbage, and an event loop for property tests to call into."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings

from coordinator.telemetry.event_loop import LoopLag
from splitserve.runtime.call_thread import favor_event_loop
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")
M = TypeVar("M", bound=Message)

EXAMPLES = int(os.environ.get("SPLITSERVE_FUZZ_EXAMPLES", "60"))
LONG_RUN = 1000
FUZZED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=settings.default.derandomize and EXAMPLES < LONG_RUN,
)
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    16,
    63,
    64,
    65,
    127,
    999,
    1000,
    4096,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**31),
]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    2.0,
    100.0,
    100.1,
    1e-45,
    3e38,
    math.nan,
    math.inf,
    -math.inf,
    -2.0,
    1e-9,
]
TEXTS = [
    "",
    "w1",
    "w1 w2 w3",
    "words",
    "user",
    "a" * 300,
    "w1 " * 3000,
    "\0",
    "日本 😀",
    "../../etc/passwd",
    "a b\nc",
    "-" * 129,
    "%s%n{}",
    '{"type": "object"}',
    '{"$ref": "#"}',
    "[" * 3000,
    "a{1,3}",
    "(((",
    'start: "a"',
    '[{"type": "function"}]',
    "127.0.0.1:1",
    "null",
    "9" * 5000,
]
BYTES = [b"", b"\0", b"salt", b"\xff" * 70, bytes(range(256))]
_WIDTHS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}


def settle_for_long_run(lag: LoopLag) -> None:
    """Before a long run, what a service does at its start; and forgets the stalls of starting."""
    if EXAMPLES >= LONG_RUN:
        gc.disable()  # what makes the inputs keeps millions of objects, whose collection takes seconds
        favor_event_loop()
    lag.computed_s = time.thread_time
    lag.longest_stall_s = 0.0


def tell_stall(lag: LoopLag) -> None:
    """Prints the longest time that the coordinator's event loop computed without a break, in CPU seconds of its thread:
    how long it waits for a core is the machine's doing. `test_event_loop_stalls.py` judges, and repeats the worst."""
    print(f"longest stall of the event loop: {lag.longest_stall_s * 1e3:.1f} ms")
    gc.collect()
    lag.longest_stall_s = 0.0


def changed(pick: random.Random, valid: M) -> M:
    """A copy with some of its fields, or nearly all, set to anything."""
    message = type(valid)()
    message.CopyFrom(valid)
    _change(pick, message, pick.choice([0.0, 0.02, 0.1, 0.3, 0.9]), 0)
    return message


def damaged(pick: random.Random, valid: bytes) -> bytes:
    """Bytes of a message with some of them changed, cut, repeated or followed by others."""
    data = bytearray(valid)
    for _ in range(pick.randint(1, 6)):
        place = pick.randint(0, len(data))
        match pick.randrange(5):
            case 0 if data:
                data[place % len(data)] = pick.randrange(256)
            case 1:
                data[place:place] = pick.randbytes(pick.randint(1, 8))
            case 2:
                del data[place : place + pick.randint(1, 20)]
            case 3:
                data += data[place : place + 30]
            case _:  # a field that nobody knows, of any wire type
                data += bytes([0x80 | pick.randrange(128), pick.randrange(1, 128)]) + pick.randbytes(5)
    return bytes(data)


def _change(pick: random.Random, message: Message, rate: float, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            _change_nested(pick, message, field, rate, depth)
        elif pick.random() < rate:
            _set(pick, message, field)


def _change_nested(
    pick: random.Random, message: Message, field: FieldDescriptor, rate: float, depth: int
) -> None:
    if field.message_type.GetOptions().map_entry:
        _change_map(pick, getattr(message, field.name), field.message_type, rate, depth)
    elif field.is_repeated:
        items = getattr(message, field.name)
        for item in items:
            _change(pick, item, rate, depth + 1)
        if pick.random() < rate and depth < 3:
            for _ in range(pick.choice([1, 1, 2, 3, 20])):
                _change(pick, items.add(), max(rate, 0.3), depth + 1)
    elif message.HasField(field.name):
        if pick.random() < rate / 4:
            message.ClearField(field.name)
        else:
            _change(pick, getattr(message, field.name), rate, depth + 1)
    elif pick.random() < rate and depth < 3:
        nested = getattr(message, field.name)
        nested.SetInParent()
        _change(pick, nested, max(rate, 0.3), depth + 1)


def _change_map(pick: random.Random, items: Any, entry: Descriptor, rate: float, depth: int) -> None:
    """A map whose keys are texts and whose values are messages."""
    assert entry.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
    for key in sorted(items):
        _change(pick, items[key], rate, depth + 1)
    if pick.random() < rate and depth < 3:
        for _ in range(pick.choice([1, 1, 2, 20])):
            _change(pick, items[pick.choice(TEXTS)], max(rate, 0.3), depth + 1)


def _set(pick: random.Random, message: Message, field: FieldDescriptor) -> None:
    if not field.is_repeated:
        setattr(message, field.name, _value(pick, field))
        return
    items = getattr(message, field.name)
    count = pick.choice([0, 1, 2, 5, 70, 2000])
    del items[:]
    items.extend(_value(pick, field) for _ in range(count))


def _value(pick: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return pick.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return pick.choice(BYTES)
        case FieldDescriptor.TYPE_BOOL:
            return pick.random() < 0.5
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return pick.choice(FLOATS) if pick.random() < 0.8 else pick.uniform(-3, 3)
    low, high = _WIDTHS[field.type]
    value = pick.choice(NUMBERS) if pick.random() < 0.7 else pick.randrange(low, high)
    return min(max(value, low), high)


def as_they_are(data: bytes) -> bytes:
    """The serializer of a channel that sends raw bytes."""
    return data


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    """Reads a call to its end, whatever that is."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def exchange(
    channel: grpc.Channel, method: str, messages: Sequence[bytes], limit_s: float
) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Sends all messages of a stream and reads to its end: the status, its details, and what was answered.

    The channel is not an asyncio one: there, a write to a call that the server has ended meanwhile takes the place of
    the server's status (https://github.com/grpc/grpc/issues/36066).
    """
    make: Any = channel.stream_stream(
        method, request_serializer=as_they_are, response_deserializer=as_they_are
    )
    answers: list[bytes] = []
    call = make(iter(messages), timeout=limit_s)
    with suppress(grpc.RpcError):
        answers.extend(call)
    return call.code(), call.details() or "", answers


class Loop:
    """An event loop on a thread of its own, with something running on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = PATIENCE_S) -> T:
        """Runs a coroutine there; returns its result or raises its exception."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    @contextmanager
    def holding(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
        """Enters an async context there, and leaves it there."""
        leave, ready = asyncio.Event(), Future[T]()

        async def hold() -> None:
            try:
                async with make() as made:
                    ready.set_result(made)
                    await leave.wait()
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                raise

        held = asyncio.run_coroutine_threadsafe(hold(), self._loop)
        made = ready.result(PATIENCE_S)
        try:
            yield made
        finally:
            self._loop.call_soon_threadsafe(leave.set)
            held.result(PATIENCE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_S)


@asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel for any method and any bytes."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield channel


@contextmanager
def raw_stream_channel(address: str) -> Iterator[grpc.Channel]:
    """A channel for `exchange`."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield channel
