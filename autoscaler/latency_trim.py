"""Trim by measured latency: the last word over a count that demand gave, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

from autoscaler.advice import Advice, Situation
from autoscaler.histogram import Histogram
from autoscaler.slo_tuning import SloTuning

BUSY = 0.5
"""Utilization below which requests are slow for another reason than too few replicas: long prompts, slow steps."""
TOLERANCE = 0.1
"""As an HPA's; the histograms' buckets are not finer."""


@dataclass(frozen=True, slots=True)
class TrimMemory:
    """Since when the percentile exceeds the target, while nothing starts; None while it does not."""

    above_since_s: float | None = None


def trim(
    memory: TrimMemory,
    now_s: float,
    situation: Situation,
    advice: Advice,
    measured_s: float | None,
    idle: bool,
    utilization: float,
    target_s: float,
    tuning: SloTuning,
) -> tuple[Advice, TrimMemory]:
    """Adds a replica when the target is missed for long though demand says otherwise; holds the count while the
    measured percentile is near the target of a pool that is busy, or unknown (`measured_s` None) while there is
    traffic (not `idle`)."""
    above = measured_s is not None and measured_s > (1 + TOLERANCE) * target_s and utilization >= BUSY
    since = (memory.above_since_s if memory.above_since_s is not None else now_s) if above else None
    if situation.starting > 0 or advice.wanted > situation.current:
        since = None
    if since is not None and now_s - since >= tuning.trim_after_s and measured_s is not None:
        reason = f"latency {measured_s * 1e3:.0f} ms above {target_s * 1e3:.0f} ms for {now_s - since:.0f} s"
        return Advice(situation.current + 1, reason, max(advice.need, situation.current)), TrimMemory(None)
    if advice.wanted < situation.current and not idle:
        if measured_s is None:
            return Advice(
                situation.current, "latency not measured: no scaling down", advice.need
            ), TrimMemory(since)
        if measured_s > tuning.comfortable * target_s and utilization >= BUSY:
            reason = f"latency {measured_s * 1e3:.0f} ms near {target_s * 1e3:.0f} ms: no scaling down"
            return Advice(situation.current, reason, advice.need), TrimMemory(since)
    return advice, TrimMemory(since)


def measured(histogram: Histogram | None, percentile: float, tuning: SloTuning) -> float | None:
    """The percentile, seconds; None when too few requests were measured."""
    if histogram is None or histogram.total < tuning.min_samples:
        return None
    return histogram.percentile(percentile)
