"""The inputs of a simulated run, except the policy: trace, engine, targets, and how long replicas take to start."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.traces.scaling import pool_work_s
from autoscaler.simulation.traces.trace import Trace
from splitserve.config.coordinator import AdmissionConfig, LocalPrefill
from splitserve.errors import InvalidArgumentError
from splitserve.roles import POOLS, PoolName

_P95_Z = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class DrawnStart:
    """How one start goes."""

    took_s: float
    """Seconds from the order until the replica is ready or, if the start fails, until its process ends."""
    fails: bool = False


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Start times by a log-normal distribution: above 0 and skewed to the right, as pulling images and loading weights
    are, and given by two percentiles. The n-th replica of a pool draws the same time under every policy.

    A failed start takes as long as any other and then ends, like a worker that finds too little memory after loading
    its weights.
    """

    median_s: float = 60.0
    p95_s: float | None = None
    """None: all starts take `median_s`."""
    failing: float = 0.0
    """Share of starts that fail."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median_s) and self.median_s >= 0):
            raise InvalidArgumentError(
                f"cold_start must be at least 0, not {self.median_s:g}", field="cold_start"
            )
        if self.p95_s is not None and not (math.isfinite(self.p95_s) and self.p95_s >= self.median_s > 0):
            message = (
                f"cold_start_p95 must be at least the median, which must be above 0 ({self.median_s:g}),"
                f" not {self.p95_s:g}"
            )
            raise InvalidArgumentError(message, field="cold_start_p95")
        if not 0 <= self.failing < 1:
            raise InvalidArgumentError(
                f"failed_starts must be at least 0 and below 1, not {self.failing:g}", field="failed_starts"
            )

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return 0.0 if self.p95_s is None else math.log(self.p95_s / self.median_s) / _P95_Z

    @property
    def mean_s(self) -> float:
        """Mean time of a start, seconds."""
        return self.median_s * math.exp(self.spread**2 / 2)

    def of(self, name: str) -> DrawnStart:
        """The start of the replica of this name."""
        if not self.spread and not self.failing:
            return DrawnStart(self.median_s)
        chance = random.Random(f"{self.seed} {name}")
        took_s = self.median_s * math.exp(chance.gauss(0.0, self.spread))
        return DrawnStart(took_s, chance.random() < self.failing)

    def __str__(self) -> str:
        text = f"{self.median_s:g} s"
        if self.p95_s is not None:
            text += f", p95 {self.p95_s:g} s"
        return f"{text}, {self.failing:.0%} fail" if self.failing else text


_MINUTE_S = 60.0
_FIRST_MINUTES = 5
_FIRST_UTILIZATION = 0.8


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of every request, seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that determines a run, except the policy. Times in seconds."""

    trace: Trace
    engine: EngineModel = field(default_factory=EngineModel)
    slo: Slo = field(default_factory=Slo)
    starts: StartTimes = field(default_factory=StartTimes)
    """How long cold starts take."""
    initial: Mapping[PoolName, int] | None = None
    """Replicas ready at the start, the same for all policies. Default: enough for the busiest of the first five minutes
    at 80% utilization."""
    both: int = 0
    """Replicas of role `both`, ready at the start. No policy starts, moves or ends them."""
    prefix_cache: bool = True
    """Whether each replica caches prefixes."""
    cache_tokens: int | None = None
    """Capacity of each cache. Default: the KV capacity of a replica."""
    admission: AdmissionConfig | None = None
    """The coordinator's admission control. None: requests go to the replicas at once."""
    local_prefill: LocalPrefill = "auto"
    """The coordinator's setting: whether decode replicas compute prompts themselves."""
    changes_role: bool = False
    """Whether replicas can take the other pool's role while they run."""

    @property
    def tpot_target_s(self) -> float | None:
        """The TPOT target of all requests, in seconds; None: no target."""
        return None if self.admission is None else self.admission.tpot_slo_s

    def first_replicas(self) -> Mapping[PoolName, int]:
        """Replicas at the start, without those of role `both`."""
        if self.initial is not None:
            return self.initial
        work: dict[PoolName, list[float]] = {pool: [0.0] * _FIRST_MINUTES for pool in POOLS}
        for request in self.trace.requests:
            minute = int(request.arrival_s // _MINUTE_S)
            if minute >= _FIRST_MINUTES:
                break
            prefill_s, decode_s = pool_work_s([request], self.engine, self.slo.tpot_s)
            work["prefill"][minute] += prefill_s
            work["decode"][minute] += decode_s
        length_s = min(_MINUTE_S, max(1.0, self.trace.duration_s)) * _FIRST_UTILIZATION
        return {pool: max(1, math.ceil(max(work[pool]) / length_s)) for pool in POOLS}
