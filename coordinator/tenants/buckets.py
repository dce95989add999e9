"""Token buckets as pure functions of time. Levels may be negative: a debt that only time pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 1e-6
"""Of a unit. Who waits as long as told must not fail for the last bit of a float."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Units a second, and how many may gather while nobody spends."""

    rate_per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was there at some moment, in units; `at_s` on a monotonic clock."""

    level: float
    at_s: float


def full(limit: Limit, now: float) -> Bucket:
    """A bucket that nobody has spent from."""
    return Bucket(limit.burst, now)


def level(bucket: Bucket, limit: Limit, now: float) -> float:
    """What is there now. Time that runs backwards brings nothing."""
    return min(limit.burst, bucket.level + max(0.0, now - bucket.at_s) * limit.rate_per_s)


def spend(bucket: Bucket, limit: Limit, amount: float, now: float) -> Bucket:
    """The bucket after `amount` was taken, be it there or not."""
    return Bucket(level(bucket, limit, now) - amount, max(now, bucket.at_s))


def wait_s(bucket: Bucket, limit: Limit, amount: float, now: float) -> float:
    """Seconds until `amount` may be spent if nobody else spends meanwhile; 0: now.

    What exceeds the burst can never gather: it may be spent from a full bucket, and leaves a debt.
    """
    missing = min(amount, limit.burst) - level(bucket, limit, now)
    return missing / limit.rate_per_s if missing > TOLERANCE else 0.0


def hint_s(seconds: float) -> float:
    """A wait as told to clients: rounded up to the next millisecond, never down."""
    return math.ceil(seconds * 1e3) / 1e3
