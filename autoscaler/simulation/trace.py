"""What a trace is: requests in order of their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `block_ids` name the prompt's 512-token blocks: equal beginnings have equal ids."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


BLOCK_TOKENS = 512
"""Tokens of one of `block_ids`; the unit of Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A named sequence of requests. Arrivals are not negative and never decrease."""

    name: str
    requests: Sequence[TraceRequest]

    @property
    def duration_s(self) -> float:
        """Until the last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0
