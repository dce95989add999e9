"""A tenant's usage: token buckets, requests in progress, and counts for metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from coordinator.tenants.policy_file import TenantPolicy
from splitserve.errors import ResourceExhaustedError

Outcome = Literal["completed", "failed", "refused"]
Kind = Literal["prompt", "output"]
Measure = Literal["requests", "prompt_tokens", "output_tokens"]
CONCURRENCY_RETRY_S = 1.0
"""A guess, since the end of a running request is unknown."""


class TenantUsage:
    """One tenant's usage. It survives a reload of the tenants file, which changes only the limits."""

    def __init__(self, policy: TenantPolicy, now: float) -> None:
        self.running = 0
        self.outcomes: dict[Outcome, int] = {"completed": 0, "failed": 0, "refused": 0}
        self.tokens: dict[Kind, int] = {"prompt": 0, "output": 0}
        self._buckets: dict[Measure, Bucket] = {}
        self.adopt(policy, now)

    def adopt(self, policy: TenantPolicy, now: float) -> None:
        """Applies a new policy. Spent amounts, debts included, stay spent."""
        self.policy = policy
        self._limits = limits_of(policy)
        self._buckets = {
            measure: self._buckets.get(measure) or full(limit, now) for measure, limit in self._limits.items()
        }

    def enter(self, least_prompt_tokens: int, now: float) -> None:
        """Charges a request before any work for it, and the `least_prompt_tokens` that its prompt certainly has.

        Raises ResourceExhaustedError, and charges nothing, if the tenant is over its quota, is in debt or has too many
        requests in progress. Each `enter` needs a `leave`.
        """
        most = self.policy.max_concurrent_requests
        if most is not None and self.running >= most:
            self.outcomes["refused"] += 1
            message = f"tenant {self.policy.name} has {self.running} requests in progress, which is its limit"
            raise ResourceExhaustedError(
                message, reason="TENANT_CONCURRENCY", retry_after_s=CONCURRENCY_RETRY_S
            )
        # The output length is not known yet: a request may start unless there is a debt.
        self._charge({"requests": 1, "prompt_tokens": least_prompt_tokens, "output_tokens": 0}, now)
        self.running += 1

    def leave(self) -> None:
        """Counts the end of a request that has entered."""
        self.running -= 1

    def charge_prompt(self, tokens: int, charged: int, now: float) -> None:
        """Charges a prompt of which `charged` tokens were charged on entry. Raises ResourceExhaustedError, and charges
        nothing more, if over quota."""
        metered = "prompt_tokens" in self._limits
        if metered:
            # The tokens charged on entry are returned first: the prompt is charged as a whole or not at all.
            self._spend("prompt_tokens", -charged, now)
        try:
            self._charge({"prompt_tokens": tokens}, now)
        except ResourceExhaustedError:
            if metered:
                self._spend("prompt_tokens", charged, now)
            raise
        self.tokens["prompt"] += tokens

    def charge_resumed(self, tokens: int, now: float) -> None:
        """Charges the tokens of a resumed answer, which are computed again. May leave a debt for later requests."""
        if "prompt_tokens" in self._limits:
            self._spend("prompt_tokens", tokens, now)

    def sent(self, output_tokens: int, now: float) -> None:
        """Charges output tokens that were sent."""
        self.tokens["output"] += output_tokens
        if "output_tokens" in self._limits:
            self._spend("output_tokens", output_tokens, now)

    def count(self, outcome: Outcome) -> None:
        """Counts the end of a request whose prompt was charged."""
        self.outcomes[outcome] += 1

    def _charge(self, cost: Mapping[Measure, float], now: float) -> None:
        limits = {measure: limit for measure, limit in self._limits.items() if measure in cost}
        waits = {
            measure: wait_s(self._buckets[measure], limit, cost[measure], now)
            for measure, limit in limits.items()
        }
        longest = max(waits, key=lambda measure: waits[measure], default=None)
        if longest is not None and waits[longest] > 0:
            self.outcomes["refused"] += 1
            raise self._over(longest, waits[longest])
        for measure in limits:
            self._spend(measure, cost[measure], now)

    def _spend(self, measure: Measure, amount: float, now: float) -> None:
        self._buckets[measure] = spend(self._buckets[measure], self._limits[measure], amount, now)

    def _over(self, measure: Measure, wait: float) -> ResourceExhaustedError:
        rate = self._limits[measure].rate_per_s
        what = measure.replace("_", " ")
        message = f"tenant {self.policy.name} is over its quota of {rate:g} {what} a second"
        field = f"{measure}_per_second"
        return ResourceExhaustedError(message, reason="TENANT_QUOTA", field=field, retry_after_s=hint_s(wait))


def limits_of(policy: TenantPolicy) -> dict[Measure, Limit]:
    """A tenant's rates as limits. A bucket holds at least one request or token."""
    rates: Iterable[tuple[Measure, float | None]] = (
        ("requests", policy.requests_per_second),
        ("prompt_tokens", policy.prompt_tokens_per_second),
        ("output_tokens", policy.output_tokens_per_second),
    )
    return {
        measure: Limit(rate, max(1.0, rate * policy.burst_seconds))
        for measure, rate in rates
        if rate is not None
    }


TOLERANCE = 1e-6
"""Units that may be missing: absorbs rounding, so that a client that waits as long as hinted is not refused."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate in units per second, and the most units that accumulate."""

    rate_per_s: float
    burst: float


def level(bucket: Bucket, limit: Limit, now: float) -> float:
    """Units in the bucket now. Time running backwards adds nothing."""
    return min(limit.burst, bucket.level + max(0.0, now - bucket.at_s) * limit.rate_per_s)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Token bucket: `level` units at time `at_s` on the monotonic clock. Negative: a debt."""

    level: float
    at_s: float


def full(limit: Limit, now: float) -> Bucket:
    """A full bucket."""
    return Bucket(limit.burst, now)


def spend(bucket: Bucket, limit: Limit, amount: float, now: float) -> Bucket:
    """The bucket after taking `amount`, even if that leaves a debt."""
    return Bucket(level(bucket, limit, now) - amount, max(now, bucket.at_s))


def wait_s(bucket: Bucket, limit: Limit, amount: float, now: float) -> float:
    """Seconds until `amount` may be spent if nothing else is spent meanwhile; 0: now.

    An amount above the burst can never accumulate: it may be spent from a full bucket and leaves a debt.
    """
    missing = min(amount, limit.burst) - level(bucket, limit, now)
    return missing / limit.rate_per_s if missing > TOLERANCE else 0.0


def hint_s(seconds: float) -> float:
    """A wait as a retry hint: rounded up to the next millisecond."""
    return math.ceil(seconds * 1e3) / 1e3
