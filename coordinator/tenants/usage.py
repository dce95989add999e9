"""A tenant's usage: token buckets, requests in progress, and counts for metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        self.policy, before = policy, self._buckets
        self._buckets = {}
        for measure, limit in limits_of(policy).items():
            bucket = self._buckets[measure] = before.get(measure) or Bucket(limit, now)
            bucket.limit = limit

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
        # The tokens charged on entry are returned first: the prompt is charged as a whole or not at all.
        self._spend("prompt_tokens", -charged, now)
        try:
            self._charge({"prompt_tokens": tokens}, now)
        except ResourceExhaustedError:
            self._spend("prompt_tokens", charged, now)
            raise
        self.tokens["prompt"] += tokens

    def charge_resumed(self, tokens: int, now: float) -> None:
        """Charges the tokens of a resumed answer, which are computed again. May leave a debt for later requests."""
        self._spend("prompt_tokens", tokens, now)

    def sent(self, output_tokens: int, now: float) -> None:
        """Charges output tokens that were sent."""
        self.tokens["output"] += output_tokens
        self._spend("output_tokens", output_tokens, now)

    def count(self, outcome: Outcome) -> None:
        """Counts the end of a request whose prompt was charged."""
        self.outcomes[outcome] += 1

    def _charge(self, cost: Mapping[Measure, float], now: float) -> None:
        waits = {
            measure: bucket.wait_s(cost[measure], now)
            for measure, bucket in self._buckets.items()
            if measure in cost
        }
        longest = max(waits, key=lambda measure: waits[measure], default=None)
        if longest is not None and waits[longest] > 0:
            self.outcomes["refused"] += 1
            raise self._over(longest, waits[longest])
        for measure, amount in cost.items():
            self._spend(measure, amount, now)

    def _spend(self, measure: Measure, amount: float, now: float) -> None:
        if (bucket := self._buckets.get(measure)) is not None:
            bucket.spend(amount, now)

    def _over(self, measure: Measure, wait_s: float) -> ResourceExhaustedError:
        rate, what = self._buckets[measure].limit.rate_per_s, measure.replace("_", " ")
        message = f"tenant {self.policy.name} is over its quota of {rate:g} {what} a second"
        field = f"{measure}_per_second"
        hint = hint_s(wait_s)
        return ResourceExhaustedError(message, reason="TENANT_QUOTA", field=field, retry_after_s=hint)


def limits_of(policy: TenantPolicy) -> dict[Measure, Limit]:
    """A tenant's rates as limits. A bucket holds at least one request or token."""
    rates: Mapping[Measure, float | None] = {
        "requests": policy.requests_per_second,
        "prompt_tokens": policy.prompt_tokens_per_second,
        "output_tokens": policy.output_tokens_per_second,
    }
    return {
        measure: Limit(rate, max(1.0, rate * policy.burst_seconds))
        for measure, rate in rates.items()
        if rate is not None
    }


TOLERANCE = 1e-6
"""Units that may be missing: absorbs rounding, so that a client that waits as long as hinted is not refused."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate in units per second, and the most units that accumulate."""

    rate_per_s: float
    burst: float


class Bucket:
    """A token bucket, full at first. Times are on the monotonic clock; one that runs backwards adds nothing."""

    def __init__(self, limit: Limit, now: float) -> None:
        self.limit = limit
        """May be replaced; what was spent, debts included, stays spent."""
        self._level, self._at_s = limit.burst, now

    def level(self, now: float) -> float:
        """Units in the bucket; negative: a debt."""
        return min(self.limit.burst, self._level + max(0.0, now - self._at_s) * self.limit.rate_per_s)

    def spend(self, amount: float, now: float) -> None:
        """Takes `amount`, even if that leaves a debt."""
        self._level, self._at_s = self.level(now) - amount, max(now, self._at_s)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be spent if nothing else is spent meanwhile; 0: now.

        An amount above the burst can never accumulate: it may be spent from a full bucket and leaves a debt.
        """
        missing = min(amount, self.limit.burst) - self.level(now)
        return missing / self.limit.rate_per_s if missing > TOLERANCE else 0.0


def hint_s(seconds: float) -> float:
    """A wait as a retry hint: rounded up to the next millisecond."""
    return math.ceil(seconds * 1e3) / 1e3
