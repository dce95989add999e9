"""The policy `predictive`: `slo`, and never fewer replicas than a seasonal forecast of the demand needs.

The forecast is Holt-Winters' with additive season (statsmodels `ExponentialSmoothing`; Hyndman and Athanasopoulos,
"Forecasting: Principles and Practice", section 8.3), refitted after each interval once two seasons are recorded. It
is read one cold start ahead, so that replicas are ready in time. It only ever adds to what `slo` wants.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from autoscaler.policies.policy_file import PredictivePool
from autoscaler.policies.recommendation import PoolStatus, Recommendation
from autoscaler.policies.slo.slo_decode import decode_for_rate, recommend_decode
from autoscaler.policies.slo.slo_prefill import prefill_for_rate, recommend_prefill
from autoscaler.snapshot import Snapshot, lead_s
from splitserve.errors import MissingExtraError
from splitserve.roles import PoolName

SEASONS_KEPT = 4


@dataclass(frozen=True, slots=True)
class PredictiveMemory:
    """Demand by interval, and the forecast made from it. Times are those of snapshots, so a wall clock that is set
    changes nothing; the season begins with the record."""

    inner: Any = None
    """Memory of the policy `slo`."""
    seen_until_s: float = -math.inf
    """End of the last bucket counted."""
    interval: int | None = None
    """Number of the current interval."""
    amount: float = 0.0
    covered_s: float = 0.0
    """`amount` arrived in the current interval during `covered_s` recorded seconds."""
    rates: tuple[float, ...] = ()
    """Mean rate of each earlier interval, oldest first, without gaps."""
    forecast: tuple[float, ...] = ()
    """Forecast rates from this interval on; empty before two seasons are recorded."""


def recommend_predictive(
    pool: PredictivePool,
    name: PoolName,
    memory: PredictiveMemory | None,
    snapshot: Snapshot,
    status: PoolStatus,
) -> tuple[Recommendation, PredictiveMemory]:
    """The larger of what `slo` wants and what the forecast needs. Pure.

    Raises MissingExtraError when statsmodels is not installed and a forecast is due.
    """
    memory = _observed(pool, name, memory or PredictiveMemory(), snapshot)
    recommend = recommend_prefill if name == "prefill" else recommend_decode
    recommendation, inner = recommend(pool, memory.inner, snapshot, status)
    memory = replace(memory, inner=inner)
    if not memory.forecast:
        return recommendation, memory
    lead = lead_s(snapshot.pool(name), pool.cold_start_s)
    inside_s = snapshot.now_s % pool.interval_s
    last = min(int((inside_s + lead) // pool.interval_s), len(memory.forecast) - 1)
    rate = max(memory.forecast[: last + 1])
    needed = (prefill_for_rate if name == "prefill" else decode_for_rate)(pool, snapshot, rate)
    if needed is None or needed <= recommendation.wanted:
        return recommendation, memory
    reason = f"{needed} for {rate:.0f} tokens/s forecast within {lead:.0f} s; {recommendation.reason}"
    return Recommendation(needed, reason, recommendation.need), memory


def _observed(
    pool: PredictivePool, name: PoolName, memory: PredictiveMemory, snapshot: Snapshot
) -> PredictiveMemory:
    """The memory with the buckets that have ended since, and a new forecast after each interval."""
    for bucket in snapshot.arrivals:
        end = bucket.start_s + bucket.length_s
        if end > snapshot.now_s or bucket.start_s < memory.seen_until_s - 1e-6:
            continue
        memory = _entered(pool, memory, math.floor(bucket.start_s / pool.interval_s))
        arrived = bucket.uncached_tokens if name == "prefill" else bucket.output_tokens
        amount, covered_s = memory.amount + arrived, memory.covered_s + bucket.length_s
        memory = replace(memory, seen_until_s=end, amount=amount, covered_s=covered_s)
    return memory


def _entered(pool: PredictivePool, memory: PredictiveMemory, interval: int) -> PredictiveMemory:
    """The memory at the start of `interval`. Unrecorded intervals repeat the previous season, else the last rate."""
    if memory.interval is None:
        return replace(memory, interval=interval)
    if interval == memory.interval:
        return memory
    season, rates = round(pool.season_s / pool.interval_s), list(memory.rates)
    unrecorded = interval - memory.interval
    if memory.covered_s > 0 or not rates:
        rates.append(memory.amount / memory.covered_s if memory.covered_s > 0 else 0.0)
        unrecorded -= 1
    for _ in range(unrecorded):
        rates.append(rates[-season] if len(rates) >= season else rates[-1])
    kept = tuple(rates[-SEASONS_KEPT * season :])
    forecast = forecast_rates(kept, season, season, pool.forecast_percentile)
    return replace(memory, interval=interval, amount=0.0, covered_s=0.0, rates=kept, forecast=forecast)


def forecast_rates(rates: Sequence[float], season: int, steps: int, percentile: float) -> tuple[float, ...]:
    """The next `steps` rates, raised so that `percentile` of the model's past errors are covered.

    Empty with less than two seasons (or too few values for a first estimate).
    Raises MissingExtraError when statsmodels is not installed.
    """
    if len(rates) < max(2 * season, 10 + 2 * (season // 2)):
        return ()
    if max(rates) == min(rates):
        return (float(rates[-1]),) * steps
    try:
        from statsmodels.tsa.holtwinters import ExponentialSmoothing
    except ImportError:
        raise MissingExtraError("kind: predictive", "predictive") from None
    model = ExponentialSmoothing(
        list(rates), seasonal="add", seasonal_periods=season, initialization_method="heuristic"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # An optimum on the edge of the parameters' range still forecasts.
        fit = model.fit()
    spread = float(fit.resid.std()) * NormalDist().inv_cdf(percentile / 100)
    return tuple(max(0.0, float(value) + spread) for value in fit.forecast(steps))
