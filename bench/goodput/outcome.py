"""What the client saw of one request, what it makes of targets, and the figures of requests together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from autoscaler.simulation.outcome import Slo
from bench.goodput.mixes import LONG_TOKENS
from bench.goodput.statistics import percentile

Ending = Literal["complete", "refused", "failed", "timed out"]


@dataclass(frozen=True)
class SentRequest:
    """Times in seconds since the begin of the run; `event_s` those of events with text, or with the answer's end."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    """Wanted; `tokens` are those that came by the server's own count."""
    at_s: float
    """When it was to be sent, from which TTFT counts."""
    sent_s: float
    event_s: tuple[float, ...] = ()
    tokens: int = 0
    ending: Ending = "complete"
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Scheduled time to the first event; None if none came."""
        return self.event_s[0] - self.at_s if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after the first; None for one that is not complete."""
        if not self._is_whole:
            return None
        return (self.event_s[-1] - self.event_s[0]) / max(1, self.tokens - 1)

    @property
    def max_gap_s(self) -> float:
        """Longest time between two events."""
        return max((b - a for a, b in pairwise(self.event_s)), default=0.0)

    @property
    def _is_whole(self) -> bool:
        return self.ending == "complete" and bool(self.event_s) and self.tokens == self.output_tokens

    def attains(self, slo: Slo) -> bool:
        """Complete, and within both targets."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        return ttft_s is not None and tpot_s is not None and ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s

    def lateness_s(self, slo: Slo) -> float | None:
        """For a complete one that misses: how much later its end is than its targets allow, or its first token."""
        if self.ttft_s is None or self.tpot_s is None or self.attains(slo):
            return None
        return max(self.ttft_s - slo.ttft_s, (self.tpot_s - slo.tpot_s) * (self.tokens - 1))


def attained_share(requests: Sequence[SentRequest], slo: Slo) -> float | None:
    """Share of all that were sent; None of none."""
    return sum(one.attains(slo) for one in requests) / len(requests) if requests else None


def figures(requests: Sequence[SentRequest], slo: Slo) -> dict[str, Any]:
    """All figures of these requests but the share of all, which the caller takes by seed.

    `token_weighted`: the attained share of tokens, of prompts and answers together. `tpot_attained`: of the complete
    ones. Lateness is that of misses that were complete.
    """
    long = [one for one in requests if one.prompt_tokens >= LONG_TOKENS]
    short = [one for one in requests if one.prompt_tokens < LONG_TOKENS]
    kinds = sorted({one.kind for one in requests})
    ttft_s = [one.ttft_s for one in requests if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in requests if one.tpot_s is not None]
    gaps_s = [one.max_gap_s for one in requests]
    late_s = [late for one in requests if (late := one.lateness_s(slo)) is not None]
    weights = [one.prompt_tokens + one.output_tokens for one in requests]
    good = [weight for one, weight in zip(requests, weights, strict=True) if one.attains(slo)]
    endings = Counter(one.ending for one in requests)
    return {
        "requests": len(requests),
        "attained_short": _rounded(attained_share(short, slo)),
        "attained_long": _rounded(attained_share(long, slo)),
        "by_class": {
            kind: _rounded(attained_share([one for one in requests if one.kind == kind], slo))
            for kind in kinds
        },
        "token_weighted": _rounded(sum(good) / sum(weights)),
        "tpot_attained": _rounded(sum(one <= slo.tpot_s for one in tpot_s) / len(tpot_s) if tpot_s else None),
        "ttft_p50_s": _rounded(percentile(ttft_s, 0.5)),
        "ttft_p95_s": _rounded(percentile(ttft_s, 0.95)),
        "tpot_p50_s": _rounded(percentile(tpot_s, 0.5)),
        "tpot_p95_s": _rounded(percentile(tpot_s, 0.95)),
        "max_gap_p95_s": _rounded(percentile(gaps_s, 0.95)),
        "max_gap_s": _rounded(max(gaps_s, default=None)),
        "lateness_p50_s": _rounded(percentile(late_s, 0.5)),
        "lateness_max_s": _rounded(max(late_s, default=None)),
        "complete": endings["complete"],
        "refused": endings["refused"],
        "failed": endings["failed"],
        "timed_out": endings["timed out"],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
