"""The knobs of the default policy, each with a value that did well in simulation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autoscaler.behavior import PolicyModel

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class SloTuning(PolicyModel):
    """How the default policy judges demand."""

    history_s: Seconds = 1800.0
    """How far back forecasts are compared with what then arrived."""
    span_s: Seconds = 40.0
    """Demand counts as the mean of so long, or of as long as a request may wait: shorter peaks are worked off."""
    fade_s: Seconds = 900.0
    """Forecasts of arrivals so old count 1/e of present ones."""
    miss_share: Annotated[float, Field(gt=0, le=4)] = 2.0
    """Requests for which the head-room may be too small, as a multiple of those that `percentile` lets miss their
    target. Many of them still wait no longer than they may. Lower: safer and dearer."""
    slow_window_s: Seconds = 60.0
    """The present demand is the mean over so long; its growth is judged against as long before."""
    fast_window_s: Seconds = 10.0
    """A step of the demand is looked for in so long."""
    growth_noise: Annotated[float, Field(ge=0, le=10)] = 4.0
    """Standard errors by which demand must have risen before growth is carried forward over the cold start."""
    growth_limit: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Growth that is carried forward is at most this share."""
    drain_backlog_s: Seconds = 30.0
    """A backlog that would stand when new replicas are ready shall be gone so long after."""
    hysteresis: Annotated[float, Field(ge=0, le=10)] = 3.0
    """N - 1 replicas must carry the demand and so many standard errors of its present mean before one is given up."""
    settle_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """No replica is given up before arrivals were watched for so long: burstiness is not known sooner."""
    scale_down_cold_starts: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Replicas are given up when none was wanted for so many cold starts: sooner, one that is wanted again would have
    been cheaper to keep. `behavior.scaleDown.stabilizationWindowSeconds` wins."""
    min_samples: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Measured latency counts with at least so many requests in its window."""
    trim_after_s: Seconds = 120.0
    """The percentile must exceed the target for so long, with nothing starting, before latency alone adds a replica."""
    comfortable: Annotated[float, Field(gt=0, le=1)] = 0.9
    """While a pool is busy (half used or more), replicas are given up only with the measured percentile below this
    share of the target."""
    kv_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Decode: share of the KV capacity that expected sequences may fill."""
    batch_spread: Annotated[float, Field(ge=0, le=5)] = 1.0
    """Decode: standard deviations of a replica's batch size that the TPOT target covers."""
