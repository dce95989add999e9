"""Weekly windows with a minimum number of replicas. Daylight saving time follows the named time zone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator

from autoscaler.policies.behavior import PolicyModel

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class ScheduleWindow(PolicyModel):
    """At least `replicas` from `start` until `end` on these days."""

    start: time
    """Local time of day, as "08:00"."""
    end: time
    """Local time of day at which the window ends. If it is not after `start`, the window ends on the next day."""
    days: Annotated[tuple[Day, ...], Field(min_length=1)] = DAYS
    """Days on which the window starts."""
    timezone: str = "UTC"
    """IANA name, such as Europe/Berlin."""
    replicas: Annotated[int, Field(ge=0, le=10_000)]
    """Fewest replicas in the window."""

    @field_validator("timezone")
    @classmethod
    def _known(cls, name: str) -> str:
        zone(name)
        return name

    @field_validator("start", "end", mode="before")
    @classmethod
    def _clock(cls, value: Any) -> Any:
        # YAML 1.1 reads an unquoted 18:30 as the base-60 number 1110, but 08:30 as text.
        if isinstance(value, int) and 0 <= value < 24 * 60:
            return time(value // 60, value % 60)
        if isinstance(value, str) and len(value.partition(":")[0]) == 1:
            return f"0{value}"
        return value

    @field_validator("start", "end")
    @classmethod
    def _local(cls, value: time) -> time:
        if value.tzinfo is not None:
            raise ValueError("must be a local time of day without offset; see `timezone`")
        return value


def zone(name: str) -> tzinfo:
    """The time zone of this IANA name. Raises ValueError when this machine does not know it."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"unknown time zone {name!r}; is the tzdata package installed?") from None


def scheduled_replicas(windows: Sequence[ScheduleWindow], wall_s: float, lead_s: float = 0.0) -> int:
    """The most replicas that any window wants within the next `lead_s` seconds; 0 outside all windows.

    With the cold start as lead, replicas are ready when their window begins.
    """
    return max(
        (window.replicas for window in windows if _touches(window, wall_s, wall_s + lead_s)), default=0
    )


def _touches(window: ScheduleWindow, since_s: float, until_s: float) -> bool:
    """Whether the window covers a moment of [since_s, until_s]."""
    timezone = zone(window.timezone)
    first = datetime.fromtimestamp(since_s, timezone).date() - timedelta(days=1)
    last = datetime.fromtimestamp(until_s, timezone).date()
    for offset in range((last - first).days + 1):
        day = first + timedelta(days=offset)
        if DAYS[day.weekday()] not in window.days:
            continue
        begins = datetime.combine(day, window.start, timezone)
        overnight = window.end <= window.start
        ends = datetime.combine(day + timedelta(days=1 if overnight else 0), window.end, timezone)
        if begins.timestamp() <= until_s and since_s < ends.timestamp():
            return True
    return False
