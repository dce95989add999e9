"""What the client saw of one request, what it makes of targets, and the figures of requests together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from autoscaler.simulation.scenario import Slo
from bench.goodput.mixes import LONG_TOKENS
from bench.goodput.statistics import percentile

Ending = Literal["complete", "refused", "failed", "timed out"]


@dataclass(frozen=True)
class SentRequest:
    """Times in seconds since the begin of the run; `event_s` those of events with text, or with the answer's end."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    """Tokens that the request asks for; `tokens` came, by the server's own count."""
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
    """Share of the sent requests that meet both targets; None where none was sent."""
    return sum(request.attains(slo) for request in requests) / len(requests) if requests else None


def figures(requests: Sequence[SentRequest], slo: Slo) -> dict[str, Any]:
    """All figures of these requests but the share of all, which the caller takes by seed.

    `token_weighted`: the attained share of tokens, of prompts and answers together. `tpot_attained`: of the complete
    ones. Lateness is that of misses that were complete.
    """
    long = [request for request in requests if request.prompt_tokens >= LONG_TOKENS]
    short = [request for request in requests if request.prompt_tokens < LONG_TOKENS]
    kinds = sorted({request.kind for request in requests})
    ttft_s = [request.ttft_s for request in requests if request.ttft_s is not None]
    tpot_s = [request.tpot_s for request in requests if request.tpot_s is not None]
    gaps_s = [request.max_gap_s for request in requests]
    late_s = [late for request in requests if (late := request.lateness_s(slo)) is not None]
    weights = [request.prompt_tokens + request.output_tokens for request in requests]
    good = [weight for request, weight in zip(requests, weights, strict=True) if request.attains(slo)]
    endings = Counter(request.ending for request in requests)
    return {
        "requests": len(requests),
        "attained_short": _rounded(attained_share(short, slo)),
        "attained_long": _rounded(attained_share(long, slo)),
        "by_class": {
            kind: _rounded(attained_share([request for request in requests if request.kind == kind], slo))
            for kind in kinds
        },
        "token_weighted": _rounded(sum(good) / sum(weights)),
        "tpot_attained": _rounded(
            sum(request_tpot_s <= slo.tpot_s for request_tpot_s in tpot_s) / len(tpot_s) if tpot_s else None
        ),
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
