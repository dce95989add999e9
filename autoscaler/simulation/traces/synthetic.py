"""Synthetic traces: Poisson arrivals at a rate that is constant, a ramp, a burst or a day."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.simulation.traces.trace import MOST_REQUESTS, Trace, TraceRequest
from splitserve.errors import InvalidArgumentError

_SHORTEST = 0.1
"""Least length, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class TraceShape:
    """A synthetic trace. Rates in requests a second, lengths in tokens, times in seconds.

    `constant`: `rate` throughout. `ramp`: from `rate` to `peak_rate`. `burst`: `rate`, and `peak_rate`
    from the middle on for `burst_s`. `diurnal`: one period of a sine between the two, lowest at both ends.
    Prompt and output lengths are exponential with these means, cut at ten times, or all equal (`equal`).
    """

    kind: str
    rate: float = 2.0
    peak_rate: float = 8.0
    duration_s: float = 3600.0
    burst_s: float = 300.0
    prompt_tokens: int = 1000
    output_tokens: int = 200
    equal: bool = False
    even: bool = False
    """Arrivals at even distances instead of at random."""
    seed: int = 0


def synthetic(shape: TraceShape) -> Trace:
    """The trace of a shape; the same for the same seed. Raises InvalidArgumentError naming what is wrong."""
    rate_at = _rates(shape).get(shape.kind)
    if rate_at is None:
        raise InvalidArgumentError(
            f"trace: no such synthetic trace: {shape.kind!r} ({', '.join(SYNTHETIC)})", field="trace"
        )
    sizes = {
        "rate": shape.rate,
        "peak_rate": shape.peak_rate,
        "duration_s": shape.duration_s,
        "burst_s": shape.burst_s,
        "prompt_tokens": shape.prompt_tokens,
        "output_tokens": shape.output_tokens,
    }
    for name, value in sizes.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgumentError(f"{name} must be above 0, not {value}", field=name)
    chance = random.Random(shape.seed)
    highest = max(shape.rate, shape.peak_rate)
    if highest * shape.duration_s > MOST_REQUESTS:
        what = f"{highest:g} requests a second for {shape.duration_s:g} s are more than {MOST_REQUESTS}"
        raise InvalidArgumentError(f"trace: {what}", reason="TRACE_TOO_LONG", field="trace")
    requests: list[TraceRequest] = []
    now_s = owed = 0.0
    while True:
        # Thinning (Lewis and Shedler 1979): arrivals at the highest rate, each kept with its share.
        now_s += 1 / highest if shape.even else chance.expovariate(highest)
        if now_s >= shape.duration_s:
            return Trace(shape.kind, requests)
        share = rate_at(now_s) / highest
        owed += share
        if owed >= 1 - 1e-9 if shape.even else chance.random() < share:
            owed -= 1
            prompt, output = (
                _length(chance, mean, shape) for mean in (shape.prompt_tokens, shape.output_tokens)
            )
            requests.append(TraceRequest(now_s, prompt, output))


SYNTHETIC = ("constant", "ramp", "burst", "diurnal")


def _rates(shape: TraceShape) -> dict[str, Callable[[float], float]]:
    low, high, length_s = shape.rate, shape.peak_rate, shape.duration_s
    return {
        "constant": lambda _: low,
        "ramp": lambda at: low + (high - low) * at / length_s,
        "burst": lambda at: high if 0 <= at - length_s / 2 < shape.burst_s else low,
        "diurnal": lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / length_s)) / 2,
    }


def _length(chance: random.Random, mean: int, shape: TraceShape) -> int:
    if shape.equal:
        return mean
    return max(1, round(min(10.0, _SHORTEST + chance.expovariate(1 / (1 - _SHORTEST))) * mean))
