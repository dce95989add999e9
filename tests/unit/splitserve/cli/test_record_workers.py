"""The workers at the end of a recording: all coordinators are asked at once, for one deadline."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.cli.advisor.record import MAX_TARGETS, WORKERS_S, first_told
from splitserve.errors import UnavailableError
from tests.support.virtual_time import run_in_virtual_time

ended: list[str] = []


async def answer(after_s: float, *workers: str) -> list[str]:
    try:
        await asyncio.sleep(after_s)
    finally:
        ended.append("one")
    return list(workers)


async def refuse() -> list[str]:
    raise UnavailableError("nobody answers")


def test_coordinators_that_hang_take_one_deadline_together() -> None:
    ended.clear()
    hang = [answer(1e6, "w") for _ in range(MAX_TARGETS)]
    assert run_in_virtual_time(first_told(hang, WORKERS_S)) == ((), WORKERS_S)
    assert len(ended) == MAX_TARGETS, "none is left behind"


def test_the_first_that_tells_of_a_worker_is_enough() -> None:
    ended.clear()
    asked = [answer(1e6, "hangs"), refuse(), answer(1.0), answer(3.0, "late"), answer(2.0, "w1", "w2")]
    assert run_in_virtual_time(first_told(asked, WORKERS_S)) == (["w1", "w2"], 2.0)
    assert len(ended) == 4


def test_where_all_have_nothing_nobody_is_waited_for() -> None:
    asked = [refuse(), answer(1.0), refuse()]
    assert run_in_virtual_time(first_told(asked, WORKERS_S)) == ((), 1.0)
    assert run_in_virtual_time(first_told([], WORKERS_S)) == ((), 0.0)


def test_a_fault_of_our_own_is_raised() -> None:
    async def broken() -> list[str]:
        raise KeyError("workers")

    with pytest.raises(KeyError):
        run_in_virtual_time(first_told([broken(), answer(1e6)], WORKERS_S))
