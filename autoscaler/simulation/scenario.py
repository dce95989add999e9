"""What determines a simulated run, except the policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.preemptions import NONE_TAKEN, Preemptions
from autoscaler.simulation.start_times import StartTimes
from autoscaler.simulation.traces.scaling import decode_claim
from autoscaler.simulation.traces.trace import Trace
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import POOLS, PoolName
from engine.pacing.token_clock import ServiceTargets
from splitserve.config.coordinator import AdmissionConfig
from splitserve.errors import InvalidArgumentError

_MINUTE_S = 60.0
_FIRST_MINUTES = 5
_FIRST_UTILIZATION = 0.8


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that determines a run, except the policy. Times in seconds."""

    trace: Trace
    engine: EngineModel = field(default_factory=EngineModel)
    slo: Slo = field(default_factory=Slo)
    cold_start_s: float = 60.0
    initial: Mapping[PoolName, int] | None = None
    """Replicas ready at the start, the same for all policies. Default: enough for the busiest of the first five
    minutes at 80% utilization."""
    window_s: float = 60.0
    """Window of the histograms in snapshots."""
    prefix_cache: str = "worker"
    """See `ClusterSettings`."""
    no_worker_wait_s: float = 2.0
    wake_s: float = 1.0
    """See `ClusterSettings`."""
    start_times: StartTimes | None = None
    """Cold starts by chance. None: each takes `cold_start_s`, and none fails."""
    admission: AdmissionConfig | None = None
    """See `ClusterSettings`."""
    colocated: bool = False
    """See `ClusterSettings`."""
    steps: bool = False
    """Whether replicas are computed step by step; the SLO is then each request's own target."""
    hybrid: bool = False
    """Whether the coordinator's pair policy says who computes a prompt, as its setting `hybrid`; with `steps` only."""
    lent_cores: bool = False
    """Whether replicas lend each other cores, as workers on one cpu host do; with `steps` only."""
    speeds: Mapping[PoolName, Mapping[str, float]] = field(default_factory=dict)
    """See `ClusterSettings`. `initial` counts units."""
    spot: Mapping[PoolName, Collection[str]] = field(default_factory=dict)
    """See `ClusterSettings`."""
    preemptions: Preemptions = NONE_TAKEN
    """Of the machines of these classes."""
    neutral: bool = False
    """Whether replicas are neutral ones. `initial` says how many lean where at first."""

    def __post_init__(self) -> None:
        if not 0 <= self.wake_s < math.inf:
            raise InvalidArgumentError(f"wake must be at least 0, not {self.wake_s:g}", field="wake")
        if self.neutral and self.steps and not self.hybrid:
            message = "neutral workers that are computed step by step need the pair policy (hybrid: on)"
            raise InvalidArgumentError(message, field="hybrid")
        if self.steps and self.preemptions.per_hour:
            message = "preemptions are simulated in closed form only, not with --steps"
            raise InvalidArgumentError(message, field="preemptions")
        if self.steps:
            _check_steps(self)
            return
        for name, wanted in (("hybrid", self.hybrid), ("lent_cores", self.lent_cores)):
            if wanted:
                message = f"{name} needs replicas that are computed step by step (--steps)"
                raise InvalidArgumentError(message, field=name)

    @property
    def settings(self) -> ClusterSettings:
        """Settings of the simulated cluster."""
        targets = ServiceTargets(self.slo.tpot_s, self.slo.ttft_s)
        return ClusterSettings(
            self.engine,
            self.cold_start_s,
            self.prefix_cache,
            no_worker_wait_s=self.no_worker_wait_s,
            admission=self.admission,
            colocated=self.colocated,
            steps=self.steps,
            hybrid=self.hybrid,
            lent_cores=self.lent_cores,
            neutral=self.neutral,
            speeds=self.speeds,
            spot=self.spot,
            preemptions=self.preemptions,
            targets=targets if self.steps else None,
            leaning_targets=targets,
            wake_s=self.wake_s,
            start_times=self.start_times,
        )

    @property
    def starts(self) -> StartTimes:
        """How long starts take."""
        return self.start_times or StartTimes(self.cold_start_s)

    def first_replicas(self) -> Mapping[PoolName, int]:
        """Replicas at the start."""
        if self.initial is not None:
            return self.initial
        work: dict[PoolName, list[float]] = {pool: [0.0] * _FIRST_MINUTES for pool in POOLS}
        for request in self.trace.requests:
            minute = int(request.arrival_s // _MINUTE_S)
            if minute >= _FIRST_MINUTES:
                break
            share, busy_s = decode_claim(self.engine, request, self.slo.tpot_s)
            work["prefill"][minute] += self.engine.prompt_s(request.prompt_tokens)
            work["decode"][minute] += share * busy_s
        length_s = min(_MINUTE_S, max(1.0, self.trace.duration_s)) * _FIRST_UTILIZATION
        return {pool: max(1, math.ceil(max(work[pool]) / length_s)) for pool in POOLS}


def _check_steps(scenario: Scenario) -> None:
    """Raises InvalidArgumentError for what the engine's own core refuses."""
    if scenario.prefix_cache == "pool":
        raise InvalidArgumentError(
            "prefix_cache: an engine has a cache of its own: worker or off", field="prefix_cache"
        )
    engine = scenario.engine
    most = min(engine.context_tokens, engine.kv_capacity_tokens)
    for number, request in enumerate(scenario.trace.requests):
        if request.prompt_tokens + request.output_tokens > most:
            raise InvalidArgumentError(
                f"trace: request {number} has {request.prompt_tokens} + {request.output_tokens} tokens;"
                f" a replica holds {most}",
                field="trace",
            )
