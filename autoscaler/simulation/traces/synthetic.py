"""Synthetic traces: Poisson arrivals at a rate that is constant, a ramp, a burst or a day; lengths by percentiles."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import NormalDist

from autoscaler.simulation.traces.trace import MOST_REQUESTS, Trace, TraceRequest
from splitserve.errors import InvalidArgumentError

_SHORTEST = 0.1
"""Least length, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class TraceShape:
    """A synthetic trace. Rates in requests a second, lengths in tokens, times in seconds.

    `constant`: `rate` throughout. `ramp`: from `rate` to `peak_rate`. `burst`: `rate`, and `peak_rate`
    from the middle on for `burst_s`. `diurnal`: one period of a sine between the two, lowest at both ends.
    Prompt and output lengths are exponential with these means, cut at ten times.
    """

    kind: str
    rate: float = 2.0
    peak_rate: float = 8.0
    duration_s: float = 3600.0
    burst_s: float = 300.0
    prompt_tokens: int = 1000
    output_tokens: int = 200
    seed: int = 0


def synthetic(shape: TraceShape) -> Trace:
    """The trace of a shape; the same for the same seed. Raises InvalidArgumentError naming what is wrong."""
    rate_at = _rates(shape).get(shape.kind)
    if rate_at is None:
        raise InvalidArgumentError(
            f"trace: no such synthetic trace: {shape.kind!r} ({', '.join(SYNTHETIC)})", field="trace"
        )
    for name, value in asdict(shape).items():
        if name not in ("kind", "seed") and not (math.isfinite(value) and value > 0):
            raise InvalidArgumentError(f"{name} must be above 0, not {value}", field=name)
    chance = random.Random(shape.seed)
    highest = max(shape.rate, shape.peak_rate)
    if highest * shape.duration_s > MOST_REQUESTS:
        what = f"{highest:g} requests a second for {shape.duration_s:g} s are more than {MOST_REQUESTS}"
        raise InvalidArgumentError(f"trace: {what}", reason="TRACE_TOO_LONG", field="trace")
    requests: list[TraceRequest] = []
    now_s = 0.0
    while True:
        # Thinning (Lewis and Shedler 1979): arrivals at the highest rate, each kept with its share.
        now_s += chance.expovariate(highest)
        if now_s >= shape.duration_s:
            return Trace(shape.kind, requests)
        if chance.random() < rate_at(now_s) / highest:
            prompt, output = (_length(chance, mean) for mean in (shape.prompt_tokens, shape.output_tokens))
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


def _length(chance: random.Random, mean: int) -> int:
    return max(1, round(min(10.0, _SHORTEST + chance.expovariate(1 / (1 - _SHORTEST))) * mean))


MOST_TOKENS = 1_000_000
_LENGTHS = re.compile(r"(\d{1,7})|p50=(\d{1,7}),p95=(\d{1,7})", re.ASCII)
_P95_Z, _TAIL_Z = (NormalDist().inv_cdf(share) for share in (0.95, 0.999))


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens, log-normal with these two percentiles, from the 0.1st to the 99.9th; fixed if they are
    equal."""

    p50: int
    p95: int

    @classmethod
    def parse(cls, name: str, text: str) -> LengthDistribution:
        """From `1200`, or `p50=800,p95=4000`. Raises InvalidArgumentError naming `name`."""
        match = _LENGTHS.fullmatch(text.replace(" ", ""))
        tokens = [int(number) for number in match.groups() if number] if match else [0]
        if not 1 <= tokens[0] <= tokens[-1] <= MOST_TOKENS:
            message = (
                f"{name}: expected a length of 1..{MOST_TOKENS} tokens, or two that do not fall as in "
                f"p50=800,p95=4000, not {text!r}"
            )
            raise InvalidArgumentError(message, field=name)
        return cls(tokens[0], tokens[-1])

    def sample(self, chance: random.Random) -> int:
        """A length, tokens."""
        if self.p50 == self.p95:
            return self.p50
        z = max(-_TAIL_Z, min(_TAIL_Z, chance.gauss(0, 1)))
        return max(1, min(MOST_TOKENS, round(self.p50 * math.pow(self.p95 / self.p50, z / _P95_Z))))


def steady(
    rate: float, duration_s: float, prompts: LengthDistribution, outputs: LengthDistribution, seed: int
) -> Trace:
    """Poisson arrivals at `rate` a second. The same for the same seed."""
    chance = random.Random(seed)
    requests, now_s = [], 0.0
    while (now_s := now_s + chance.expovariate(rate)) < duration_s:
        requests.append(TraceRequest(now_s, prompts.sample(chance), outputs.sample(chance)))
    return Trace(f"{rate:g} requests/s", requests)
