"""When a prompt is computed on the decode worker itself, without prefill worker and handoff.

Pure: from measured rates to a number of tokens. The decode worker computes the prompt itself if its prefix cache lacks
at most that many tokens, which only it knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.routing.router import Pair
from coordinator.routing.scores import prefill_score_s
from coordinator.workers.load import DecodeLoad

NO_LIMIT = 2**32 - 1
_NEW_SHARE = 0.1
_ARRIVAL_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalPrefillFacts:
    """Inputs of the decision, known once a request has a pair of workers."""

    split_s: float
    """Seconds that prefill, its queue included, and the handoff would take."""
    tokens_per_s: float
    """Prompt tokens per second of the decode worker; 0 if unknown."""
    waiting_tokens: int = 0
    """Prompt tokens already queued on the decode worker."""
    running_requests: int = 0
    """Sequences in the decode worker's batch, all of which stall meanwhile."""
    arrivals_per_s: float = 0.0
    """Requests per second that reach the decode worker; those that arrive meanwhile wait."""


def local_prefill_tokens(facts: LocalPrefillFacts) -> int:
    """The most prompt tokens that a local prefill computes at no more cost than a handoff; 0: none.

    Computing for t seconds delays the request by t, each of the n running sequences by t, and each arrival, at rate a,
    by t/2 on average: t (1 + n) + a t^2 / 2 in total. The largest t for which that does not exceed `split_s` is the
    root of the quadratic; the tokens are t times the rate.
    """
    if facts.tokens_per_s <= 0 or facts.split_s <= 0:
        return 0
    linear, quadratic = 1.0 + facts.running_requests, facts.arrivals_per_s / 2
    # This form of the root also holds for an arrival rate of zero.
    compute_s = 2 * facts.split_s / (linear + math.sqrt(linear**2 + 4 * quadratic * facts.split_s))
    tokens = int(compute_s * facts.tokens_per_s) - facts.waiting_tokens
    return min(max(tokens, 0), NO_LIMIT)


class HandoffMeter:
    """Measures the duration of handoffs and the arrival rate of attempts, as exponential means."""

    def __init__(self) -> None:
        self._handoff_s = 0.0
        self._arrivals = 0.0
        self._seen_s = 0.0

    @property
    def handoff_s(self) -> float:
        """Mean seconds from the end of prefill to the first decode step; 0 until measured."""
        return self._handoff_s

    def record(self, took_s: float) -> None:
        """Takes the duration of a handoff, in seconds."""
        self._handoff_s += (took_s - self._handoff_s) * (_NEW_SHARE if self._handoff_s else 1.0)

    def count_arrival(self, now: float) -> None:
        """Counts an attempt. `now` is in seconds, always on the same clock."""
        self._arrivals = self._remembered(now) + 1.0
        self._seen_s = now

    def arrivals_per_s(self, now: float) -> float:
        """Attempts per second over about the last `_ARRIVAL_MEMORY_S`."""
        return self._remembered(now) / _ARRIVAL_MEMORY_S

    def _remembered(self, now: float) -> float:
        return self._arrivals * math.exp((self._seen_s - now) / _ARRIVAL_MEMORY_S)


def facts_of_pair(
    pair: Pair, decode: DecodeLoad, prompt_tokens: int, meter: HandoffMeter, now: float
) -> LocalPrefillFacts:
    """The facts for a request with `prompt_tokens` uncached tokens on `pair`, whose decode worker has this load.

    A decode worker that has not computed a prompt yet is assumed to be as fast as the prefill worker. What this
    coordinator knows itself of the decode worker goes before its report, which may be half a second old.
    """
    prefill_rate = pair.prefill.load.prefill_tokens_per_second
    split_s = 0.0
    if prefill_rate:
        split_s = prefill_score_s(pair.queued_tokens, prompt_tokens, prefill_rate) + meter.handoff_s
    return LocalPrefillFacts(
        split_s=split_s,
        tokens_per_s=decode.report.prefill_tokens_per_second or prefill_rate,
        waiting_tokens=decode.waiting_prompt_tokens,
        running_requests=decode.streams,
        arrivals_per_s=meter.arrivals_per_s(now) / max(1, pair.decode_candidates),
    )
