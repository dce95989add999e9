"""Schedules: days, nights, time zones, daylight saving, and replicas that are ready when a window begins."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policies.schedule import ScheduleWindow, scheduled_replicas
from tests.support.scaling.snapshots import snapshot


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def window(**fields: Any) -> ScheduleWindow:
    return ScheduleWindow.model_validate({"start": "08:00", "end": "18:00", "replicas": 5, **fields})


@pytest.mark.parametrize(
    ("moment", "replicas"),
    [
        ("2026-03-02T07:59:59", 0),
        ("2026-03-02T08:00:00", 5),
        ("2026-03-02T17:59:59", 5),
        ("2026-03-02T18:00:00", 0),
    ],
)
def test_a_window_includes_its_start_and_not_its_end(moment: str, replicas: int) -> None:
    assert scheduled_replicas([window()], at(moment)) == replicas


def test_a_night_belongs_to_the_day_on_which_it_starts() -> None:
    night = window(start="22:00", end="06:00", days=["fri"])
    assert scheduled_replicas([night], at("2026-03-06T23:00:00")) == 5
    assert scheduled_replicas([night], at("2026-03-07T05:00:00")) == 5
    assert scheduled_replicas([night], at("2026-03-07T23:00:00")) == 0


def test_daylight_saving_moves_the_window_with_the_clock() -> None:
    berlin = window(timezone="Europe/Berlin")
    assert scheduled_replicas([berlin], at("2026-03-27T07:00:00")) == 5
    assert scheduled_replicas([berlin], at("2026-03-30T06:00:00")) == 5
    assert scheduled_replicas([berlin], at("2026-03-27T06:59:00")) == 0


def test_the_lead_looks_ahead() -> None:
    assert scheduled_replicas([window()], at("2026-03-02T07:59:00"), lead_s=60.0) == 5
    assert scheduled_replicas([window()], at("2026-03-02T07:58:59"), lead_s=60.0) == 0


def test_the_highest_of_several_windows_counts() -> None:
    assert scheduled_replicas([window(), window(replicas=9, start="12:00")], at("2026-03-02T13:00:00")) == 9


def test_unquoted_times_of_yaml_are_understood() -> None:
    # YAML 1.1 reads 18:30 as 18 * 60 + 30.
    assert window(end=1110).end == window(end="18:30").end
    assert window(start="8:15").start == window(start="08:15").start


def test_a_schedule_lifts_any_kind_of_policy() -> None:
    rule = {"start": "08:00", "end": "18:00", "replicas": 5}
    policy = parse_policy(
        {
            "prefill": {"target_ms": 1000, "schedule": [rule]},
            "decode": {"kind": "schedule", "schedule": [rule]},
        }
    )
    plan, _ = make_decide(policy)(None, snapshot(prefill=1, decode=4, wall_s=at("2026-03-02T09:00:00")))
    assert (plan.prefill.desired, plan.decode.desired) == (5, 5)
    assert "by schedule" in plan.prefill.reason
    assert plan.prefill.cause == plan.decode.cause == "schedule"


def test_an_offset_is_refused() -> None:
    with pytest.raises(ValidationError, match="without offset"):
        window(start="08:00+02:00")
