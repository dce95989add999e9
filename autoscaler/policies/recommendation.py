"""A pool policy's recommendation, before `behavior`, bounds and GPU budget apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoscaler.policies.policy_file import SloPool
from autoscaler.snapshot import Snapshot
from splitserve.histograms import Histogram


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool at the moment of a decision."""

    current: int
    """Replicas in rotation that the last plan wanted, including starting ones."""
    ready: int
    """Replicas in rotation."""
    starting: int
    """Replicas that are starting within their deadline."""
    existing: int | None = None
    """Replicas that serve or can: in rotation, starting or on surplus standby. Fewer than `current` when the last plan
    could not be carried out. None: as many as `current`."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The replicas that a policy wants, with its reason."""

    wanted: int
    """Replicas."""
    reason: str
    """One line for operators."""
    need: float = 0.0
    """Replicas kept busy by the demand, not rounded; decides which pool yields under a GPU budget."""
    error: str = ""
    """The policy's error; empty while it works."""


Recommend = Callable[[Any, Snapshot, PoolStatus], tuple[Recommendation, Any]]
"""One pool's policy: (its memory, None at first; snapshot; status) -> (recommendation, memory). Pure."""


BUSY = 0.5
"""Below this utilization, slow requests have another cause than too few replicas, such as long prompts or slow
steps."""
COMFORTABLE = 0.9
"""A busy pool loses replicas only with the measured percentile below this share of the target."""
TOLERANCE = 0.1
"""Relative tolerance around the target, as an HPA's; histogram buckets are no finer."""


@dataclass(frozen=True, slots=True)
class TrimMemory:
    """Memory of `trim`."""

    above_since_s: float | None = None
    """Since when the percentile has exceeded the target with no replica starting; None while it does not."""


def trim(
    pool: SloPool,
    memory: TrimMemory,
    now_s: float,
    status: PoolStatus,
    recommendation: Recommendation,
    latency: Histogram | None,
    busy: float | None,
) -> tuple[Recommendation, TrimMemory]:
    """Corrects a recommendation by the measured latency. `busy`: replicas that demand fills; None while unknown.

    1. The target has been missed for long although demand does not need more replicas: one more than exist. A replica
       that was wanted and never came is not counted.
    2. A busy pool's percentile is near the target: no scaling down.
    3. Too few requests were measured: no scaling down, unless the remaining replicas would not be busy. Such a pool's
       requests may be served elsewhere.
    """
    target_s, enough = pool.target_ms / 1e3, latency is not None and latency.total >= pool.slo.min_samples
    measured_s = latency.percentile(pool.percentile) if latency is not None and enough else None
    is_busy = busy is None or busy >= BUSY * status.ready
    above = measured_s is not None and measured_s > (1 + TOLERANCE) * target_s and is_busy
    since = (memory.above_since_s if memory.above_since_s is not None else now_s) if above else None
    if status.starting > 0 or recommendation.wanted > status.current:
        since = None
    if since is not None and now_s - since >= pool.slo.trim_after_s and measured_s is not None:
        reason = f"latency {measured_s * 1e3:.0f} ms above {target_s * 1e3:.0f} ms for {now_s - since:.0f} s"
        existing = status.current if status.existing is None else status.existing
        wanted = max(status.current, existing + 1)
        return Recommendation(wanted, reason, max(recommendation.need, existing)), TrimMemory(None)
    if recommendation.wanted >= status.current:
        return recommendation, TrimMemory(since)
    if measured_s is None and (busy is None or busy >= BUSY * recommendation.wanted):
        reason = "latency not measured: no scaling down"
    elif measured_s is not None and measured_s > COMFORTABLE * target_s and is_busy:
        reason = f"latency {measured_s * 1e3:.0f} ms near {target_s * 1e3:.0f} ms: no scaling down"
    else:
        return recommendation, TrimMemory(since)
    return Recommendation(status.current, reason, recommendation.need), TrimMemory(since)
