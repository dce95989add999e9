"""When output is held back, and for how long."""

from __future__ import annotations

import asyncio

from coordinator.workers.output_stream import (
    MAX_CALL_WAIT_S,
    MAX_WAITERS_PER_TURN,
    OutputCoalescer,
    OutputCollector,
    next_interval_s,
)
from splitserve.generation.output_delta import TokenDelta
from splitserve.v1 import generation_pb2

MAX_S = 0.01


def output(position: int, finish: int = 0) -> TokenDelta:
    return TokenDelta(position, [7], "x", finish)  # type: ignore[arg-type]


def loaded() -> OutputCoalescer:
    coalescer = OutputCoalescer(MAX_S)
    for _ in range(100):
        coalescer.on_sample(1.0, 0.0)
    return coalescer


def test_an_idle_loop_never_waits() -> None:
    coalescer = OutputCoalescer(MAX_S)
    for _ in range(100):
        coalescer.on_sample(0.2, 0.001)
    assert coalescer.interval_s == 0


def test_load_lengthens_the_interval_up_to_its_limit_and_idleness_ends_it() -> None:
    coalescer = loaded()
    assert coalescer.interval_s == MAX_S
    for _ in range(100):
        coalescer.on_sample(0.1, 0.0)
    assert coalescer.interval_s == 0


def test_a_late_loop_counts_as_busy() -> None:
    coalescer = OutputCoalescer(MAX_S)
    for _ in range(100):
        coalescer.on_sample(0.1, 0.05)
    assert coalescer.interval_s == MAX_S


def test_between_the_bounds_the_interval_stays() -> None:
    assert next_interval_s(0.004, 0.4, MAX_S) == 0.004


def test_zero_never_waits() -> None:
    assert next_interval_s(0.0, 1.0, 0.0) == 0


async def test_middle_tokens_wait_for_the_interval_and_come_together() -> None:
    coalescer, collector = loaded(), OutputCollector()
    collector.put(output(1), coalescer)
    collector.put(output(2), coalescer)
    assert collector.take_all() == []
    await collector.wait()
    assert [event.first_position for event in collector.take_all()] == [1, 2]  # type: ignore[union-attr]


async def test_first_token_and_end_do_not_wait() -> None:
    coalescer = loaded()
    for event in (output(0), output(5, generation_pb2.FINISH_REASON_LENGTH)):
        collector = OutputCollector()
        collector.put(event, coalescer)
        assert collector.take_all() == [event]


async def test_the_end_takes_along_what_was_held() -> None:
    coalescer, collector = loaded(), OutputCollector()
    collector.put(output(1), coalescer)
    collector.put(output(2, generation_pb2.FINISH_REASON_STOP), coalescer)
    assert len(collector.take_all()) == 2
    await asyncio.sleep(2 * MAX_S)  # the flush still runs, and finds nothing
    assert collector.take_all() == []


async def test_many_waiters_are_woken_over_several_turns() -> None:
    coalescer, woken = OutputCoalescer(), []
    for number in range(3 * MAX_WAITERS_PER_TURN):
        coalescer.schedule(lambda n=number: woken.append(n))  # type: ignore[misc]
    counts = []
    while len(woken) < 3 * MAX_WAITERS_PER_TURN:
        await asyncio.sleep(0)
        counts.append(len(woken))
    assert MAX_WAITERS_PER_TURN in counts
    assert 2 * MAX_WAITERS_PER_TURN in counts
    assert woken == list(range(3 * MAX_WAITERS_PER_TURN))


def test_calls_wait_under_load_only_and_less_than_output() -> None:
    assert OutputCoalescer(MAX_S).call_wait_s() == 0.0
    coalescer = OutputCoalescer(1.0)
    for _ in range(100):
        coalescer.on_sample(1.0, 0.0)
    assert coalescer.interval_s == 1.0
    assert coalescer.call_wait_s() == MAX_CALL_WAIT_S
