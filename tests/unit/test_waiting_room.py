"""Reservations that wait for blocks are served in order, with bounded overtaking."""

from __future__ import annotations

import pytest

from decode_worker.waiting_room import Granted, WaitingReservation, WaitingRoom
from engine.types import EngineRequest, SamplingParams, StopParams
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, SplitserveError


class Answers(list[Granted | SplitserveError]):
    def __call__(self, answer: Granted | SplitserveError) -> None:
        self.append(answer)


def entry(
    name: str, *, priority: int = 0, deadline_s: float = 100.0, answers: Answers | None = None
) -> WaitingReservation:
    request = EngineRequest(
        name, (1,), SamplingParams(), StopParams(max_tokens=1), priority=priority, deadline_s=deadline_s
    )
    return WaitingReservation(
        request, f"coordinator-of-{name}", "", 0.0, Answers() if answers is None else answers
    )


def served(room: WaitingRoom, fits: set[str]) -> list[str]:
    names: list[str] = []

    def try_reserve(waiting: WaitingReservation) -> bool:
        name = waiting.request.request_id
        if name in fits:
            names.append(name)
        return name in fits

    room.grant(try_reserve)
    return names


def test_higher_priority_goes_first_and_equals_keep_their_order() -> None:
    room = WaitingRoom(max_waiting=10, max_bypasses=5)
    for name, priority in (("a", 0), ("b", 0), ("c", 3), ("d", 3)):
        room.add(entry(name, priority=priority))
    assert served(room, {"a", "b", "c", "d"}) == ["c", "d", "a", "b"]
    assert len(room) == 0


def test_one_that_does_not_fit_is_overtaken_only_so_often() -> None:
    room = WaitingRoom(max_waiting=10, max_bypasses=2)
    room.add(entry("large"))
    for name in ("s1", "s2", "s3"):
        room.add(entry(name))
    assert served(room, {"s1"}) == ["s1"]
    assert served(room, {"s2"}) == ["s2"]
    assert served(room, {"s3"}) == []
    assert served(room, {"large", "s3"}) == ["large", "s3"]


def test_late_ones_get_their_error() -> None:
    room = WaitingRoom(max_waiting=10, max_bypasses=2)
    answers = Answers()
    room.add(entry("late", deadline_s=5.0, answers=answers))
    room.add(entry("early", deadline_s=50.0))
    room.expire(5.0)
    assert [type(answer) for answer in answers] == [DeadlineExceededError]
    assert len(room) == 1


def test_a_full_room_refuses_with_a_hint() -> None:
    room = WaitingRoom(max_waiting=1, max_bypasses=2)
    room.add(entry("a"))
    with pytest.raises(ResourceExhaustedError) as raised:
        room.add(entry("b"))
    assert raised.value.reason == "QUEUE_FULL"
    assert raised.value.retry_after_s is not None


def test_removal_by_request_and_by_coordinator() -> None:
    room = WaitingRoom(max_waiting=10, max_bypasses=2)
    for name in ("a", "b", "c"):
        room.add(entry(name))
    assert room.remove("a")
    assert not room.remove("a")
    room.remove_coordinator("coordinator-of-b")
    assert served(room, {"a", "b", "c"}) == ["c"]
