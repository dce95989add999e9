"""What determines a simulated cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoscaler.simulation.preemptions import NONE_TAKEN, Preemptions
from autoscaler.simulation.start_times import StartTimes
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import PoolName
from engine.pacing.token_clock import ServiceTargets
from splitserve.config.coordinator import AdmissionConfig


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Constants of a run. Times in seconds."""

    engine: EngineModel
    cold_start_s: float
    prefix_cache: str = "worker"
    """`worker`: one for each prefill replica; `pool`: one that all share; `off`."""
    cache_tokens: int | None = None
    """Capacity of each cache. Default: the KV capacity of a replica."""
    no_worker_wait_s: float = 2.0
    """How long a request waits for a ready replica before it fails."""
    on_demand: bool = False
    """Whether replicas of a pool that has none are started on demand; requests then wait for them for `TIMEOUT_S`."""
    admission: AdmissionConfig | None = None
    """The coordinator's admission control. None: requests go to the replicas at once."""
    colocated: bool = False
    """As `local_prefill: always`: decode replicas compute all prompts but those of answers of one token."""
    steps: bool = False
    """Whether replicas are computed step by step, with the engine's own scheduler."""
    targets: ServiceTargets | None = None
    """Of every request, where replicas are computed step by step."""
    hybrid: bool = False
    """Whether the pair policy says who computes a prompt; step by step only."""
    lent_cores: bool = False
    """Whether replicas are on one host and lend each other cores for chunks of prompts; step by step only."""
    wake_s: float = 1.0
    """From the decision that a sleeping standby joins until it serves."""
    start_times: StartTimes | None = None
    """None: every start takes `cold_start_s`, and none fails."""
    speeds: Mapping[PoolName, Mapping[str, float]] = field(default_factory=dict)
    """Of the classes of replicas, by name; the first one of a pool is that of the replicas at the start."""
    spot: Mapping[PoolName, Collection[str]] = field(default_factory=dict)
    """The classes whose machines are taken away, as `preemptions` says; in closed form only."""
    preemptions: Preemptions = NONE_TAKEN
    neutral: bool = False
    """Whether replicas are neutral, and lean at first to the pool that they are ordered for."""
    leaning_targets: ServiceTargets | None = None
    """Targets of the coordinator's settings, by which its planner moves them. Default: those of every request."""

    def speed_of(self, pool: PoolName, kind: str) -> float:
        """How many replicas of speed 1 one of this class is there."""
        return self.speeds.get(pool, {}).get(kind, 1.0)

    def engine_of(self, pool: PoolName, kind: str) -> EngineModel:
        """A replica of this class in a pool; a neutral one has a speed in each."""
        if not self.neutral:
            return self.engine.at_speed(pool, self.speed_of(pool, kind))
        prompts = self.engine.at_speed("prefill", self.speed_of("prefill", kind))
        return prompts.at_speed("decode", self.speed_of("decode", kind))
