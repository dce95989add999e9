"""When output waits for a beat, and for how long."""

from __future__ import annotations

import asyncio

from coordinator.inbox import Inbox
from coordinator.pulse import AT_ONCE, Pulse, next_beat_s
from splitserve.v1 import decode_pb2, generation_pb2

MAX_S = 0.01


def output(position: int, finish: int = 0) -> decode_pb2.SequenceOutput:
    delta = generation_pb2.OutputDelta(first_position=position, token_ids=[7], text="x")
    delta.finish_reason = finish  # type: ignore[assignment]
    return decode_pb2.SequenceOutput(request_id="r", delta=delta)


def loaded() -> Pulse:
    pulse = Pulse(MAX_S)
    for _ in range(100):
        pulse.note(1.0, 0.0)
    return pulse


def test_an_idle_loop_never_waits() -> None:
    pulse = Pulse(MAX_S)
    for _ in range(100):
        pulse.note(0.2, 0.001)
    assert pulse.beat_s == 0


def test_load_lengthens_the_beat_up_to_its_limit_and_idleness_ends_it() -> None:
    pulse = loaded()
    assert pulse.beat_s == MAX_S
    for _ in range(100):
        pulse.note(0.1, 0.0)
    assert pulse.beat_s == 0


def test_a_late_loop_counts_as_busy_whoever_has_the_core() -> None:
    pulse = Pulse(MAX_S)
    for _ in range(100):
        pulse.note(0.1, 0.05)
    assert pulse.beat_s == MAX_S


def test_between_the_bounds_the_beat_stays() -> None:
    assert next_beat_s(0.004, 0.4, MAX_S) == 0.004


def test_zero_never_waits() -> None:
    assert next_beat_s(0.0, 1.0, 0.0) == 0


async def test_middle_tokens_wait_for_the_beat_and_come_together() -> None:
    pulse, inbox = loaded(), Inbox()
    inbox.put(output(1), pulse)
    inbox.put(output(2), pulse)
    assert inbox.take_all() == []
    await inbox.wait()
    assert [event.delta.first_position for event in inbox.take_all()] == [1, 2]  # type: ignore[union-attr]


async def test_first_token_and_end_do_not_wait() -> None:
    pulse = loaded()
    for event in (output(0), output(5, generation_pb2.FINISH_REASON_LENGTH)):
        inbox = Inbox()
        inbox.put(event, pulse)
        assert inbox.take_all() == [event]


async def test_the_end_takes_along_what_was_held() -> None:
    pulse, inbox = loaded(), Inbox()
    inbox.put(output(1), pulse)
    inbox.put(output(2, generation_pb2.FINISH_REASON_STOP), pulse)
    assert len(inbox.take_all()) == 2
    await asyncio.sleep(2 * MAX_S)  # the beat still comes, and finds nothing
    assert inbox.take_all() == []


async def test_a_crowd_is_woken_over_several_turns() -> None:
    pulse, woken = Pulse(), []
    for number in range(3 * AT_ONCE):
        pulse.wake(lambda n=number: woken.append(n))  # type: ignore[misc]
    counts = []
    while len(woken) < 3 * AT_ONCE:
        await asyncio.sleep(0)
        counts.append(len(woken))
    assert AT_ONCE in counts
    assert 2 * AT_ONCE in counts
    assert woken == list(range(3 * AT_ONCE))
