"""Result rows from single measurements of handoffs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from bench.asking import AskedAnswer


@dataclass(frozen=True)
class Handoff:
    """One handoff as its two workers saw it. Times in seconds of CLOCK_MONOTONIC, which both read."""

    size: int
    descriptors: int
    contiguous_runs: int
    computed_s: float
    admitted_s: float

    @property
    def exposed_s(self) -> float:
        """End of the last prefill step, its sampling included, until the sequence is in the decode batch."""
        return self.admitted_s - self.computed_s


@dataclass
class Samples:
    """All measurements of one prompt length."""

    prompt_tokens: int
    split: list[AskedAnswer] = field(default_factory=list)
    colocated: list[AskedAnswer] = field(default_factory=list)
    handoffs: list[Handoff] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)
    other_load: list[float] = field(default_factory=list)

    def extend(self, more: Samples) -> None:
        """Adds the measurements of a turn."""
        self.split += more.split
        self.colocated += more.colocated
        self.handoffs += more.handoffs
        self.raw_s += more.raw_s
        self.other_load += more.other_load


@dataclass(frozen=True)
class HandoffRow:
    """The figures of one prompt length, as the docstring of `bench.handoff.phases` describes them."""

    prompt_tokens: int
    repeats: int
    bytes: int
    exposed_ms_p50: float
    exposed_ms_p95: float
    gb_per_s: float
    raw_gb_per_s: float
    bandwidth_share_of_raw: float
    descriptors: int
    contiguous_runs: int
    ttft_split_ms_p50: float
    ttft_colocated_ms_p50: float
    ttft_split_minus_colocated_ms: float
    around_compute_ms: float
    compute_difference_ms: float
    second_token_gap_ms_p50: float
    second_token_gap_colocated_ms_p50: float
    normal_step_ms_p50: float
    other_load: float

    def as_json(self) -> dict[str, Any]:
        """Floats with six significant digits: a rate in GB/s may be small, and is never nothing."""
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(self).items()}


def make_row(samples: Samples) -> HandoffRow:
    """Medians, and the 95th percentile where asked. `samples` must hold at least one of each kind."""
    exposed = [handoff.exposed_s for handoff in samples.handoffs]
    size = samples.handoffs[0].size
    gb_per_s, raw_gb_per_s = size / median(exposed) / 1e9, size / median(samples.raw_s) / 1e9
    split = [answer.token_s[0] for answer in samples.split]
    colocated = [answer.token_s[0] for answer in samples.colocated]
    steps = [step for answer in samples.split for step in answer.steps_s]
    return HandoffRow(
        prompt_tokens=samples.prompt_tokens,
        repeats=len(samples.split),
        bytes=size,
        exposed_ms_p50=_ms(exposed),
        exposed_ms_p95=_ms(exposed, 95),
        gb_per_s=gb_per_s,
        raw_gb_per_s=raw_gb_per_s,
        bandwidth_share_of_raw=gb_per_s / raw_gb_per_s,
        descriptors=int(median(handoff.descriptors for handoff in samples.handoffs)),
        contiguous_runs=int(median(handoff.contiguous_runs for handoff in samples.handoffs)),
        ttft_split_ms_p50=_ms(split),
        ttft_colocated_ms_p50=_ms(colocated),
        # Pairs adjacent in time, so that a temporary slowdown affects both.
        ttft_split_minus_colocated_ms=_ms([a - b for a, b in zip(split, colocated, strict=True)]),
        around_compute_ms=_ms(
            [a.around_s - b.around_s for a, b in zip(samples.split, samples.colocated, strict=True)]
        ),
        compute_difference_ms=_ms(
            [a.compute_s - b.compute_s for a, b in zip(samples.split, samples.colocated, strict=True)]
        ),
        second_token_gap_ms_p50=_ms([answer.second_token_gap_s for answer in samples.split]),
        second_token_gap_colocated_ms_p50=_ms([answer.second_token_gap_s for answer in samples.colocated]),
        normal_step_ms_p50=_ms(steps),
        other_load=median(samples.other_load),
    )


def _ms(seconds: Sequence[float], percentile: float = 50) -> float:
    return float(np.percentile(seconds, percentile)) * 1e3
