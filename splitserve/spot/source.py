"""The interface of what gives spot notices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from splitserve.errors import InvalidArgumentError

MAX_LEFT_S = 86_400.0
"""A notice of more than a day counts as one of a day."""


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """The machine is taken away. A notice is final: no source takes one back, and later ones only count if the machine
    ends sooner by them."""

    source: str
    """Who gave it, as in `NoticeSource.name`, or "signal"."""
    ends_s: float
    """When, on `time.monotonic`."""


class NoticeSource(ABC):
    """One way to hear of it. Used by one task."""

    name: str
    """What logs and reports call it."""

    @abstractmethod
    async def time_left_s(self) -> float | None:
        """Seconds until the machine is taken away, at least 0; None: no notice.

        Raises SplitserveError where that cannot be said now: UnavailableError if the source cannot be reached or asks
        to be asked later, InvalidArgumentError for an answer that is none.
        """

    async def close(self) -> None:
        """Lets go of connections."""
        return


def left_until_s(text: str, wall_s: float) -> float:
    """Seconds from `wall_s` (since the epoch) until this time, as `left_s`. Raises as `wall_time_s`."""
    return left_s(wall_time_s(text), wall_s)


def left_s(ends_wall_s: float, wall_s: float) -> float:
    """Seconds between the two, 0 to MAX_LEFT_S."""
    return min(max(0.0, ends_wall_s - wall_s), MAX_LEFT_S)


def wall_time_s(text: str) -> float:
    """A time in the form of RFC 3339 or of RFC 9110 ("Mon, 19 Sep 2026 18:29:47 GMT"), in seconds since the epoch. One
    without a zone is in UTC. Raises InvalidArgumentError."""
    try:
        moment = parsedate_to_datetime(text) if "," in text else datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        raise InvalidArgumentError(f"{text[:64]!r} is no time", reason="NO_TIME") from None
