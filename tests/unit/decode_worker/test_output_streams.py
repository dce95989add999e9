"""`OutputStreams`: leases, replaced streams and bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_worker import output_streams
from decode_worker.output_streams import OutputStream, OutputStreams
from splitserve.errors import FailedPreconditionError
from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import decode_pb2
from tests.support.journal import Journal

pytestmark = pytest.mark.timeout(30)
SHORT_S, LONG_S = 0.05, 3600.0


class Rig:
    """Streams whose lost coordinators are recorded."""

    def __init__(self, lease_s: float) -> None:
        self.lost: Journal[str] = Journal()
        self.streams = OutputStreams(self.lost.add, lease_s)

    def produce(self, position: int, coordinator: str = "c", size: int = 1) -> None:
        self.streams.deliver({coordinator: [("r", TokenDelta(position, [position], "x" * size))]})


async def positions(stream: OutputStream, count: int) -> list[int]:
    """The next tokens of a stream."""
    got: list[int] = []
    messages: AsyncIterator[decode_pb2.StreamOutputsResponse] = stream.messages()
    while len(got) < count:
        got += (await anext(messages)).tokens.token_ids
    return got


async def test_a_broken_stream_is_resumed() -> None:
    rig = Rig(LONG_S)
    stream = rig.streams.open("c", 1)
    rig.produce(1)
    assert await positions(stream, 1) == [1]
    rig.streams.release(stream)
    assert not rig.streams.takes("c", 1)
    rig.produce(2)
    stream = rig.streams.open("c", 2)
    rig.produce(3)
    assert stream.rewind({"r": 2}, {"r"}) == []
    assert await positions(stream, 2) == [2, 3]
    assert not rig.lost.entries


async def test_after_the_lease_the_coordinator_is_lost() -> None:
    rig = Rig(SHORT_S)
    stream = rig.streams.open("c", 1)
    rig.produce(1)
    rig.streams.release(stream)
    assert await rig.lost.wait() == "c"
    rig.produce(2)
    stream = rig.streams.open("c", 2)
    assert stream.rewind({"r": 0}, set()) == ["r"]


async def test_a_stream_that_is_open_again_has_no_lease() -> None:
    rig = Rig(SHORT_S)
    rig.streams.release(rig.streams.open("c", 1))
    rig.streams.open("c", 2)
    other = rig.streams.open("other", 1)
    rig.streams.release(other)
    assert await rig.lost.wait() == "other"
    assert rig.lost.entries == ["other"]


async def test_the_newer_of_two_streams_wins() -> None:
    rig = Rig(SHORT_S)
    older = rig.streams.open("c", 1)
    reading = asyncio.create_task(positions(older, 1))
    newer = rig.streams.open("c", 2)
    with pytest.raises(StopAsyncIteration):
        await reading
    assert older.rewind({}, set()) == []
    rig.streams.release(older)
    with pytest.raises(FailedPreconditionError):
        rig.streams.open("c", 1)
    rig.produce(1)
    assert newer.rewind({"r": 0}, {"r"}) == []
    assert await positions(newer, 1) == [1]
    assert rig.streams.takes("c", 2)
    assert not rig.lost.entries


async def test_the_output_kept_for_broken_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_streams, "MAX_KEPT_BYTES", 10_000)
    rig = Rig(LONG_S)
    open_stream = rig.streams.open("reads", 1)
    for name in ("c", "d"):
        rig.streams.release(rig.streams.open(name, 1))
    rig.produce(1, "c", size=6000)
    rig.produce(1, "reads", size=6000)
    assert not rig.lost.entries
    rig.produce(1, "d", size=6000)
    assert rig.lost.entries == ["d"]
    rig.produce(2, "c", size=1000)
    assert rig.lost.entries == ["d"]
    assert await positions(open_stream, 1) == [1]


async def test_what_is_sent_and_never_acknowledged_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_streams, "MAX_KEPT_BYTES", 10_000)
    rig = Rig(LONG_S)
    stream = rig.streams.open("c", 1)
    for position in range(1, 5):
        rig.produce(position, size=4000)
        assert await positions(stream, 1) == [position]
        rig.streams.acknowledge("c", 1, position)
    for position in range(5, 9):
        rig.produce(position, size=4000)
        if rig.lost.entries:
            break
        assert await positions(stream, 1) == [position]
        rig.streams.acknowledge("c", 7, position)  # of another stream
    assert rig.lost.entries == ["c"]


async def test_when_the_process_ends_so_do_streams_and_leases() -> None:
    rig = Rig(SHORT_S)
    rig.streams.release(rig.streams.open("detached", 1))
    reading = asyncio.create_task(positions(rig.streams.open("c", 1), 1))
    rig.streams.close_all()
    with pytest.raises(StopAsyncIteration):
        await reading
    assert not rig.lost.entries
