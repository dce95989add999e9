"""What one tenant has used: its buckets, its requests in progress, and the counts for metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from coordinator.request_validation import Generation
from coordinator.tenants import buckets
from coordinator.tenants.buckets import Bucket, Limit
from coordinator.tenants.policy_file import TenantPolicy
from splitserve.errors import ResourceExhaustedError

Outcome = Literal["completed", "failed", "refused"]
Kind = Literal["prompt", "output"]
Measure = Literal["requests", "prompt_tokens", "output_tokens"]
CONCURRENCY_RETRY_S = 1.0
"""When a running request will end is not known, so this hint is a guess."""


class Account:
    """One tenant's use. It outlives a reload of the file; only the limits change then."""

    def __init__(self, policy: TenantPolicy, now: float) -> None:
        self.running = 0
        self.outcomes: dict[Outcome, int] = {"completed": 0, "failed": 0, "refused": 0}
        self.tokens: dict[Kind, int] = {"prompt": 0, "output": 0}
        self._buckets: dict[Measure, Bucket] = {}
        self.adopt(policy, now)

    def adopt(self, policy: TenantPolicy, now: float) -> None:
        """Goes on under this policy. What was spent, debts included, stays spent."""
        self.policy = policy
        self._limits = limits_of(policy)
        self._buckets = {
            measure: self._buckets.get(measure) or buckets.full(limit, now)
            for measure, limit in self._limits.items()
        }

    def begin(self, generation: Generation, now: float) -> None:
        """Takes what a request costs at its beginning, or raises ResourceExhaustedError and takes nothing."""
        most = self.policy.max_concurrent_requests
        if most is not None and self.running >= most:
            self.outcomes["refused"] += 1
            message = f"tenant {self.policy.name} has {self.running} requests in progress, which is its limit"
            raise ResourceExhaustedError(
                message, reason="TENANT_CONCURRENCY", retry_after_s=CONCURRENCY_RETRY_S
            )
        # Output is not known yet: a request begins unless there is a debt.
        cost: dict[Measure, float] = {
            "requests": 1,
            "prompt_tokens": len(generation.prompt),
            "output_tokens": 0,
        }
        waits = {
            measure: buckets.wait_s(self._buckets[measure], limit, cost[measure], now)
            for measure, limit in self._limits.items()
        }
        longest = max(waits, key=lambda measure: waits[measure], default=None)
        if longest is not None and waits[longest] > 0:
            self.outcomes["refused"] += 1
            raise self._over(longest, waits[longest])
        for measure in self._limits:
            self._spend(measure, cost[measure], now)
        self.running += 1
        self.tokens["prompt"] += len(generation.prompt)

    def sent(self, output_tokens: int, now: float) -> None:
        """So many tokens went out."""
        self.tokens["output"] += output_tokens
        if "output_tokens" in self._limits:
            self._spend("output_tokens", output_tokens, now)

    def end(self, outcome: Outcome) -> None:
        """A request that had begun is over."""
        self.running -= 1
        self.outcomes[outcome] += 1

    def _spend(self, measure: Measure, amount: float, now: float) -> None:
        self._buckets[measure] = buckets.spend(self._buckets[measure], self._limits[measure], amount, now)

    def _over(self, measure: Measure, wait_s: float) -> ResourceExhaustedError:
        rate = self._limits[measure].rate_per_s
        what = measure.replace("_", " ")
        message = f"tenant {self.policy.name} is over its quota of {rate:g} {what} a second"
        return ResourceExhaustedError(
            message,
            reason="TENANT_QUOTA",
            field=f"{measure}_per_second",
            retry_after_s=buckets.hint_s(wait_s),
        )


def limits_of(policy: TenantPolicy) -> dict[Measure, Limit]:
    """The rates that a tenant has, as limits; a bucket holds one request or token at least."""
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
