"""Calls at a later time: in order of time, once, by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from splitserve.alarms import Alarms
from tests.support.waiting import PATIENCE_S

LONG_S = 1e12
"""More than a thread can wait for at once."""


@pytest.fixture
def alarms() -> Iterator[Alarms]:
    alarms = Alarms("test-alarms")
    yield alarms
    alarms.close()


@contextmanager
def clock_stands(alarms: Alarms) -> Iterator[None]:
    """However long it takes until all are set."""
    began_s = alarms.now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alarms, "now", lambda: began_s)
        yield


def test_what_is_due_first_is_called_first(alarms: Alarms) -> None:
    called, done = [], threading.Event()
    with clock_stands(alarms):
        assert alarms.set(LONG_S, lambda: called.append("never"))
        assert alarms.set(0.02, done.set)
        assert alarms.set(0.01, lambda: called.append("first"))
    assert done.wait(PATIENCE_S)
    assert called == ["first"]


def test_a_cancelled_one_is_not_called(alarms: Alarms) -> None:
    called, done = [], threading.Event()
    with clock_stands(alarms):
        gone = alarms.set(0.01, lambda: called.append("gone"))
        assert gone is not None
        gone.cancel()
        gone.cancel()
        assert alarms.set(0.02, done.set)
    assert done.wait(PATIENCE_S)
    assert called == []


def test_many_take_one_thread(alarms: Alarms) -> None:
    before = threading.active_count()
    found = [alarms.set(LONG_S, lambda: None) for _ in range(3000)]
    assert all(found)
    assert threading.active_count() <= before + 1


def test_without_a_thread_there_is_none(alarms: Alarms, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert alarms.set(0, lambda: None) is None
    done = threading.Event()
    assert alarms.set(0, done.set), "there may be later"
    assert done.wait(PATIENCE_S)


def test_its_thread_ends_with_it(alarms: Alarms) -> None:
    assert alarms.set(LONG_S, lambda: None)
    thread = next(one for one in threading.enumerate() if one.name == "test-alarms")
    alarms.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert alarms.set(0, lambda: None) is None
