"""The mixes of traffic that the advisor is measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import Trace
from splitserve.config.engine import EngineConfig

LONGEST = 2
"""Prompts and answers are cut at this multiple of their mean: the longest alone would miss any target."""


@dataclass(frozen=True, slots=True)
class TrafficMix:
    """Poisson arrivals with exponential lengths, and the targets. `rate` in requests a second, lengths in tokens."""

    rate: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo

    def trace(self, name: str, seconds: float, seed: int) -> Trace:
        """A trace of this mix."""
        shape = TraceShape(
            "constant",
            rate=self.rate,
            peak_rate=self.rate,
            duration_s=seconds,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seed=seed,
        )
        requests = [
            replace(
                one,
                prompt_tokens=min(one.prompt_tokens, LONGEST * self.prompt_tokens),
                output_tokens=max(2, min(one.output_tokens, LONGEST * self.output_tokens)),
            )
            for one in synthetic(shape).requests
        ]
        return Trace(name, requests)


SIMULATED = EngineConfig(
    kind="simulated",
    simulated_prefill_token_s=5e-4,
    simulated_step_s=0.02,
    simulated_sequence_s=2e-3,
)
"""2,000 prompt tokens a second, steps of 22 ms and more: beside that the processes' own CPU time is little."""

MIXES = {
    "prefill-heavy": TrafficMix(2.6, 1500, 10, Slo(2.0, 0.06)),
    "decode-heavy": TrafficMix(5.0, 100, 150, Slo(2.0, 0.06)),
    "short-chat": TrafficMix(6.0, 200, 60, Slo(1.0, 0.06)),
}
"""For `SIMULATED` and four workers."""

REAL_MIXES = {
    "prefill-heavy": TrafficMix(1.0, 500, 8, Slo(2.0, 0.15)),
    "decode-heavy": TrafficMix(0.8, 50, 60, Slo(2.0, 0.15)),
    "short-chat": TrafficMix(1.5, 120, 24, Slo(2.0, 0.15)),
}
"""For real weights and two workers on two cores."""
