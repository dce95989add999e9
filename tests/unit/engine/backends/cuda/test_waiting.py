"""Transfers go on while a device computes, and the wait ends when it is done."""

from __future__ import annotations

import torch

from engine.backends.cuda.forward import AsyncArgmax, wait_for


class Event:
    """Done after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.synchronized = False

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        self.synchronized = True


def test_polls_until_the_device_is_done() -> None:
    polls: list[int] = []
    event = Event(looks=3)
    wait_for(event, lambda: polls.append(event.looks), sleep=lambda _: None)
    assert polls == [2, 1, 0]
    assert not event.synchronized


def test_without_a_poll_the_device_alone_is_waited_for() -> None:
    event = Event(looks=3)
    wait_for(event, None)
    assert event.synchronized
    assert event.looks == 3


def test_the_tokens_of_a_step_are_waited_for_in_that_way() -> None:
    polls: list[int] = []
    argmax = AsyncArgmax(torch.tensor([[1.0, 3.0], [5.0, 2.0]]), lambda: polls.append(1))
    argmax._done = Event(looks=2)
    assert argmax() == [1, 0]
    assert polls == [1, 1]
