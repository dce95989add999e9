"""What a model is replayed with: trace, engine, starts and targets, as the options of `splitserve simulate` say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.cli import options
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.policies.policy_file import ScalingPolicy
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.scenario import Scenario
    from autoscaler.simulation.traces.trace import Trace
    from autoscaler.sizing.engine_model import EngineModel

DEFAULT_TTFT_MS = 2000.0
DEFAULT_TPOT_MS = 100.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times in seconds unless the name says otherwise; None: not given."""

    trace: str
    rate: float
    peak_rate: float
    duration: float
    burst: float
    prompt_tokens: int
    output_tokens: int
    scale: float | None
    peak_replicas: float | None
    jitter: float
    columns: str | None
    engine_preset: str
    cold_start: float
    cold_start_p95: float | None
    failed_starts: float
    ttft_ms: float | None
    tpot_ms: float | None
    seed: int
    serving: Mapping[str, Any]
    """Further arguments of a `Scenario`."""
    shift: float = 0.0
    """Arrivals come so much later; what would come after the end comes at the begin."""

    def scenario(self, policy: ScalingPolicy) -> Scenario:
        """Loads or makes the trace. Raises InvalidArgumentError naming the option."""
        from autoscaler.simulation.scenario import Scenario
        from autoscaler.simulation.start_times import StartTimes
        from autoscaler.sizing.engine_model import preset

        starts = StartTimes(self.cold_start, self.cold_start_p95, self.failed_starts, self.seed)
        engine, slo = preset(self.engine_preset), self._slo(policy)
        replayed = self._scaled(self._shifted(self._loaded()), engine, slo)
        return Scenario(replayed, engine, slo, self.cold_start, start_times=starts, **self.serving)

    def _loaded(self) -> Trace:
        """The synthetic trace of that kind, or the file of that name."""
        from autoscaler.simulation.traces.synthetic import SYNTHETIC, TraceShape, synthetic
        from autoscaler.simulation.traces.trace import load_trace

        if self.trace in SYNTHETIC:
            if self.columns is not None:
                message = f"columns: trace {self.trace} is made, and there is no file to read"
                raise InvalidArgumentError(message, field="columns")
            rates = self.rate, self.peak_rate, self.duration, self.burst
            lengths = self.prompt_tokens, self.output_tokens
            return synthetic(TraceShape(self.trace, *rates, *lengths, seed=self.seed))
        return load_trace(Path(self.trace), self.seed, options.column_map(self.columns))

    def _shifted(self, trace: Trace) -> Trace:
        from autoscaler.simulation.traces.scaling import shifted

        check_above("shift", self.shift, least=0.0)
        return shifted(trace, self.shift) if self.shift else trace

    def _slo(self, policy: ScalingPolicy) -> Slo:
        from autoscaler.policies.policy_file import SloPool
        from autoscaler.simulation.outcome import Slo

        prefill, decode = policy.prefill, policy.decode
        own_ttft = prefill.target_ms if isinstance(prefill, SloPool) else DEFAULT_TTFT_MS
        own_tpot = decode.target_ms if isinstance(decode, SloPool) else DEFAULT_TPOT_MS
        ttft = own_ttft if self.ttft_ms is None else self.ttft_ms
        tpot = own_tpot if self.tpot_ms is None else self.tpot_ms
        check_above("ttft_ms", ttft)
        check_above("tpot_ms", tpot)
        return Slo(ttft / 1e3, tpot / 1e3)

    def _scaled(self, trace: Trace, engine: EngineModel, slo: Slo) -> Trace:
        from autoscaler.simulation.traces.scaling import scaled, scaled_to_peak

        if self.peak_replicas is not None and self.scale is not None:
            raise InvalidArgumentError("peak_replicas and scale exclude each other", field="scale")
        if self.peak_replicas is not None:
            check_above("peak_replicas", self.peak_replicas)
            return scaled_to_peak(trace, self.peak_replicas, engine, slo.tpot_s, self.seed, self.jitter)
        if self.scale is None:
            return trace
        check_above("scale", self.scale)
        return scaled(trace, self.scale, self.seed, self.jitter)


def check_above(name: str, value: float, least: float | None = None) -> None:
    """Raises InvalidArgumentError for a value that is not finite or below `least`; None: not above 0."""
    if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise InvalidArgumentError(f"{name} must be {bound}, not {value:g}", field=name)
