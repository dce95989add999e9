"""Turns that the machine's host has disturbed are run again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autoscaler.simulation.scenario import Slo
from bench.goodput import turns
from bench.goodput.systems import ServingOptions
from bench.goodput.turns import FinishedTurn, TurnKey, finished_turns, kept_turns, watched_host
from bench.machine import StolenTime

KEY = TurnKey("measured", 2.0, 0, 10, "default", "")


def test_the_worst_ten_seconds_count() -> None:
    stolen = StolenTime()
    stolen._cores = 2
    taken_s = 0.0
    for second in range(60):
        stolen.look(float(second), taken_s)
        taken_s += 1.0 if 30 <= second < 35 else 0.0
    assert stolen.peak == pytest.approx(5 / (10 * 2))


def test_before_ten_seconds_have_passed_nothing_is_known() -> None:
    stolen = StolenTime()
    stolen.look(0.0, 0.0)
    stolen.look(1.0, 5.0)
    assert stolen.peak == 0


async def test_an_error_of_what_is_watched_comes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="the generator failed"):
        async with watched_host():
            raise RuntimeError("the generator failed")


@pytest.mark.parametrize(("peaks", "kept"), [((0.01,), 0.01), ((0.2, 0.04), 0.04), ((0.2, 0.06, 0.3), 0.06)])
async def test_a_disturbed_turn_is_run_again_at_most_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peaks: Sequence[float], kept: float
) -> None:
    left = iter(peaks)
    file, options = tmp_path / "runs.jsonl", ServingOptions("simulated", Slo(1.0, 0.05), tmp_path, tmp_path)
    monkeypatch.setattr(turns, "run_turn", _fake(left))
    found = [turn async for turn in finished_turns([KEY], options, 1.0, file)]
    assert [turn.stolen for turn in found] == [kept]
    assert next(left, None) is None
    assert kept_turns(file) == found


Run = Callable[[TurnKey, ServingOptions, float], Awaitable[FinishedTurn]]


def _fake(left: Iterator[float]) -> Run:
    async def run_turn(key: TurnKey, _options: ServingOptions, _timeout_s: float) -> FinishedTurn:
        return FinishedTurn(key, (), 0.0, 0.0, 0.0, (1.0, 1.0), next(left))

    return run_turn
