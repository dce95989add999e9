"""Settings of the default policy's estimate of demand: section `slo` of a pool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autoscaler.policies.behavior import PolicyModel

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class SloTuning(PolicyModel):
    """How the default policy estimates demand."""

    history_s: Seconds = 1800.0
    """How far back forecasts are compared with what then arrived."""
    span_s: Seconds = 40.0
    """Demand is averaged over this time, or over the time that a request may wait if that is longer: shorter peaks are
    worked off."""
    fade_s: Annotated[float, Field(ge=1, le=86_400)] = 900.0
    """Age at which arrivals count 1/e of current ones in the forecast."""
    miss_share: Annotated[float, Field(gt=0, le=4)] = 2.0
    """Requests for which the head-room may be too small, as a multiple of those that `percentile` lets miss their
    target. Many of them still meet it. Lower: safer and more expensive."""
    drift: Annotated[float, Field(ge=0, le=10)] = 0.08
    """Standard deviation of the demand's change in a minute, as a share of it, that counts as one more forecast error;
    it grows with the square root of the cold start. It matters where few errors are known, or only quiet ones."""
    slow_window_s: Seconds = 60.0
    """The current demand is the mean over this window; growth is measured against the window before it."""
    fast_window_s: Seconds = 10.0
    """Window in which a step of the demand is detected."""
    growth_noise: Annotated[float, Field(ge=0, le=10)] = 4.0
    """Standard errors by which demand must have risen before growth is extrapolated over the cold start."""
    growth_limit: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Largest share by which growth is extrapolated."""
    drain_backlog_s: Seconds = 30.0
    """Time in which new replicas, once ready, clear a backlog; half a cold start where that is longer."""
    hysteresis: Annotated[float, Field(ge=0, le=10)] = 3.0
    """Before one of N replicas is removed, N - 1 must carry the demand plus this many standard errors of its mean."""
    settle_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """No replica is removed before arrivals were observed for this long: burstiness is not known sooner."""
    scale_down_cold_starts: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Replicas are removed when not wanted for this many cold starts: sooner, keeping one that is wanted again would
    have been cheaper. `behavior.scaleDown.stabilizationWindowSeconds` wins."""
    min_samples: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Fewest requests in the window for measured latency to count."""
    trim_after_s: Seconds = 120.0
    """How long the percentile must exceed the target, with nothing starting, before latency alone adds a replica."""
    comfortable: Annotated[float, Field(gt=0, le=1)] = 0.9
    """While a pool is busy (half used or more), replicas are removed only with the measured percentile below this
    share of the target."""
    kv_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Decode: share of the KV capacity that expected sequences may fill."""
    batch_spread: Annotated[float, Field(ge=0, le=5)] = 1.0
    """Decode: standard deviations of a replica's batch size that the TPOT target covers."""
