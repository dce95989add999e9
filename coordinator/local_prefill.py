"""When a prompt is computed on the decode worker itself, without a prefill worker and a handoff.

Pure: measured rates in, a number of tokens out. The decode worker compares that number with what its prefix
cache lacks of the prompt, which only it knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.answer import AttemptReport
from coordinator.pools import Worker
from coordinator.routing import RouteRequest, prefill_wait_s

NO_LIMIT = 2**32 - 1
_NEW_SHARE = 0.1
_ARRIVAL_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalPrefillFacts:
    """What is known when a request has got its pair of workers. Times in seconds."""

    split_s: float
    """Until the prefill worker has computed the prompt, its queue included, and the handoff is over."""
    tokens_per_s: float
    """At which the decode worker computes prompts; 0 when nothing is known of it."""
    waiting_tokens: int = 0
    """Prompt tokens that the decode worker has before it already."""
    running_requests: int = 0
    """Sequences of the decode worker's batch: all of them stand still meanwhile."""
    arrivals_per_s: float = 0.0
    """Requests that reach the decode worker; those that come meanwhile wait."""


def local_prefill_tokens(facts: LocalPrefillFacts) -> int:
    """Prompt tokens, at most, that are computed on the decode worker sooner than by a handoff; 0: none.

    Computing for t seconds costs the request t, each of the n running sequences t, and each of the
    arrivals, at rate a, t/2 in the mean: together t (1 + n) + a t^2 / 2. The largest t for which that is no
    more than the split takes is the root of the quadratic, and the tokens are t times the rate.
    """
    if facts.tokens_per_s <= 0 or facts.split_s <= 0:
        return 0
    linear, quadratic = 1.0 + facts.running_requests, facts.arrivals_per_s / 2
    # The root in the form that also holds for a rate of zero.
    compute_s = 2 * facts.split_s / (linear + math.sqrt(linear**2 + 4 * quadratic * facts.split_s))
    tokens = int(compute_s * facts.tokens_per_s) - facts.waiting_tokens
    return min(max(tokens, 0), NO_LIMIT)


class HandoffMeter:
    """What handoffs cost, and how often requests come: exponential means of what was measured."""

    def __init__(self) -> None:
        self._handoff_s = 0.0
        self._arrivals = 0.0
        self._seen_s = 0.0

    @property
    def handoff_s(self) -> float:
        """Mean time from the end of prefill to the first decode step; 0 until measured."""
        return self._handoff_s

    def record(self, report: AttemptReport) -> None:
        """Takes the report of an ended attempt, if it holds a handoff."""
        if not report.transport:
            return
        took_s = (report.transfer_ms + report.decode_admit_ms) / 1e3
        self._handoff_s += (took_s - self._handoff_s) * (_NEW_SHARE if self._handoff_s else 1.0)

    def arrived(self, now: float) -> None:
        """Counts a request. `now` is in seconds on any one clock."""
        self._arrivals = self._remembered(now) + 1.0
        self._seen_s = now

    def arrivals_per_s(self, now: float) -> float:
        """Requests a second over about the last `_ARRIVAL_MEMORY_S`."""
        return self._remembered(now) / _ARRIVAL_MEMORY_S

    def _remembered(self, now: float) -> float:
        return self._arrivals * math.exp((self._seen_s - now) / _ARRIVAL_MEMORY_S)


def facts_of_pair(
    prefill: Worker, decode: Worker, request: RouteRequest, meter: HandoffMeter, decodes: int, now: float
) -> LocalPrefillFacts:
    """The facts for a request and its pair; `decodes` is the number of decode workers that share arrivals.

    A decode worker that has not computed a prompt yet counts as fast as the prefill worker.
    """
    prefill_rate = prefill.load.prefill_tokens_per_second
    rate = decode.load.prefill_tokens_per_second or prefill_rate
    split_s = prefill_wait_s(prefill, request, prefill_rate) + meter.handoff_s if prefill_rate else 0.0
    return LocalPrefillFacts(
        split_s=split_s,
        tokens_per_s=rate,
        waiting_tokens=decode.load.waiting_tokens,
        running_requests=decode.load.running_requests,
        arrivals_per_s=meter.arrivals_per_s(now) / max(1, decodes),
    )
