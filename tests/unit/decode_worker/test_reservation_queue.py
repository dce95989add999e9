"""Reservations that wait for blocks are served in order, with bounded bypassing."""

from __future__ import annotations

import itertools

import pytest

from decode_worker.requests import Granted, ReservationQueue, WaitingReservation
from engine.core.engine import EngineRequest, StopParams
from engine.core.model_runner import SamplingParams
from engine.scheduling.waiting_queue import Precedence
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, SplitserveError

_states = itertools.count()
"""Each try sees another state of the engine."""


class Replies(list[Granted | SplitserveError]):
    def __call__(self, answer: Granted | SplitserveError) -> None:
        self.append(answer)


def entry(
    name: str,
    *,
    priority: int = 0,
    tenant: int = 0,
    rank: int = 0,
    deadline_s: float = 100.0,
    replies: Replies | None = None,
) -> WaitingReservation:
    request = EngineRequest(
        name,
        (1,),
        SamplingParams(),
        StopParams(max_tokens=1),
        precedence=Precedence(rank, tenant, priority),
        deadline_s=deadline_s,
    )
    return WaitingReservation(
        request, f"coordinator-of-{name}", "", 0.0, Replies() if replies is None else replies
    )


def served(queue: ReservationQueue, fits: set[str]) -> list[str]:
    names: list[str] = []

    def try_reserve(waiting: WaitingReservation) -> bool:
        name = waiting.request.request_id
        if name in fits:
            names.append(name)
        return name in fits

    queue.grant((next(_states),), 0.0, try_reserve)
    return names


def test_higher_priority_goes_first_and_equals_keep_their_order() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=5)
    for name, priority in (("a", 0), ("b", 0), ("c", 3), ("d", 3)):
        queue.add(entry(name, priority=priority))
    assert served(queue, {"a", "b", "c", "d"}) == ["c", "d", "a", "b"]
    assert len(queue) == 0


def test_one_that_does_not_fit_is_bypassed_a_bounded_number_of_times() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=2)
    queue.add(entry("large"))
    for name in ("s1", "s2", "s3"):
        queue.add(entry(name))
    assert served(queue, {"s1"}) == ["s1"]
    assert served(queue, {"s2"}) == ["s2"]
    assert served(queue, {"s3"}) == []
    assert served(queue, {"large", "s3"}) == ["large", "s3"]


def test_expired_reservations_get_an_error() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=2)
    replies = Replies()
    queue.add(entry("late", deadline_s=5.0, replies=replies))
    queue.add(entry("early", deadline_s=50.0))
    assert queue.expire(5.0) == ["late"]
    assert [type(answer) for answer in replies] == [DeadlineExceededError]
    assert len(queue) == 1


def test_a_full_queue_refuses_with_a_hint() -> None:
    queue = ReservationQueue(max_waiting=1, max_bypasses=2)
    queue.add(entry("a"))
    with pytest.raises(ResourceExhaustedError) as raised:
        queue.add(entry("b"))
    assert raised.value.reason == "QUEUE_FULL"
    assert raised.value.retry_after_s is not None


def test_removal_by_request_and_by_coordinator() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=2)
    for name in ("a", "b", "c"):
        queue.add(entry(name))
    assert queue.remove("a")
    assert not queue.remove("a")
    assert queue.ids_of("coordinator-of-b") == ["b"]
    assert queue.remove("b")
    assert queue.ids_of("coordinator-of-b") == []
    assert served(queue, {"a", "b", "c"}) == ["c"]


def test_bypasses_are_bounded_within_one_round_too() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=2)
    for name in ("large", "s1", "s2", "s3", "s4"):
        queue.add(entry(name))
    assert served(queue, {"s1", "s2", "s3", "s4"}) == ["s1", "s2"]
    assert served(queue, {"s3", "s4"}) == []
    assert served(queue, {"large", "s3", "s4"}) == ["large", "s3", "s4"]


def test_class_goes_first_and_priority_counts_within_a_tenant() -> None:
    queue = ReservationQueue(max_waiting=10, max_bypasses=5)
    for name, tenant, priority in (("a-low", 1, -100), ("b", 2, 0), ("a-high", 1, 100), ("a-higher", 1, 101)):
        queue.add(entry(name, tenant=tenant, priority=priority))
    queue.add(entry("urgent", tenant=3, rank=1, priority=-100))
    everyone = {"a-low", "b", "a-high", "a-higher", "urgent"}
    assert served(queue, everyone) == ["urgent", "a-higher", "b", "a-high", "a-low"]
