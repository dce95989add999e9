"""Forecasts the demand one cold start from now from the arrivals of the last half hour.

No season is assumed. The current forecast rule is backtested on every moment of the record: how far demand returns
to its mean, and by how much it exceeds the forecast, are estimated from the record, with recent moments weighted more.
Growth beyond noise is extrapolated over the cold start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from autoscaler.policies.policy_file import SloTuning
from autoscaler.snapshot import ArrivalBucket

Amount = Callable[[ArrivalBucket], float]
Floats = npt.NDArray[np.float64]
_FEWEST_FORECASTS = 6
_MINUTE_S = 60.0
SPAN_S = 40.0
"""Demand is averaged over this time, or over the time that a request may wait if that is longer: the queue absorbs
shorter peaks."""
HYSTERESIS = 3.0
"""Before one of N replicas is removed, N - 1 must carry the demand plus this many standard errors of its mean."""
GROWTH_NOISE = 4.0
"""Standard errors by which demand must have risen before growth is extrapolated over the cold start."""
GROWTH_LIMIT = 0.5
"""Largest share by which growth is extrapolated: a rise seldom lasts for a whole cold start."""
DRIFT = 0.08
"""Standard deviation of the demand's change in a minute, as a share of the demand. It counts as one more forecast
error, which matters while few errors are known, or only small ones. It grows with the square root of the cold start."""
_DRIFTS: Floats = np.array([NormalDist().inv_cdf(0.5 + (number + 0.5) / 80) for number in range(40)])
"""Upper quantiles of the standard normal distribution at even shares: sizes of a drift, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Covered:
    """Rates, amounts a second."""

    expected: float
    with_headroom: float


@dataclass(frozen=True, slots=True, eq=False)
class DemandForecast:
    """The recorded arrivals and their summary statistics. Rates are amounts per second."""

    amounts: Floats
    """[buckets], oldest first."""
    lengths_s: Floats
    """[buckets]; the last bucket may be short."""
    weights: Floats
    """[buckets]: requests that arrived, fading with age."""
    fading: Floats
    """[buckets]: 1 for the present, 1/e after half of `history_s`."""
    slow: float
    """Mean rate of the slow window."""
    noise: float
    """Its standard error, if buckets are independent."""
    fast: float
    """Mean rate of the fast window."""
    growth: float
    """Factor, at least 1, by which demand grows until one lead from now."""
    covered_s: float
    """Length of the record, seconds."""
    settled: bool
    """Whether the record is long enough to remove replicas by it."""

    def covered_rate(self, span_s: float, lead_s: float, share: float, window_s: float) -> Covered:
        """The mean rate over `span_s` to be ready for in `lead_s` seconds: a forecast, and with head-room.

        The head-room is the `share` quantile, weighted by requests, of the backtested forecast errors: small for demand
        that drifts, large for bursts; and no less than `_conformal` makes of them. The forecast regresses the current
        rate (mean of `window_s`) towards the record's mean, by linear regression of later rates on earlier ones. The
        slope is averaged with 1 ("stays as it is"), because a short record underestimates it.
        """
        ends = np.cumsum(self.lengths_s)
        times, until = np.concatenate(([0.0], ends)), np.concatenate(([0.0], np.cumsum(self.amounts)))
        now_s = float(ends[-1])
        window_s, span_s = min(window_s, now_s), min(span_s, now_s)
        present = float(until[-1] - np.interp(now_s - window_s, times, until)) / window_s
        made = ends[(ends >= window_s - 1e-6) & (ends + lead_s + span_s / 2 <= now_s + 1e-6)]
        if made.size < _FEWEST_FORECASTS:
            return Covered(present, present)
        was = (np.interp(made, times, until) - np.interp(made - window_s, times, until)) / window_s
        middles = made + lead_s
        ahead, behind = (np.interp(middles + shift, times, until) for shift in (span_s / 2, -span_s / 2))
        came = (ahead - behind) / span_s
        at = np.minimum(np.searchsorted(ends, middles), ends.size - 1)
        fading, weights = self.fading[at], self.weights[at]
        slope = (1 + _slope(was, came, fading)) / 2
        mean_was, mean_came = (float(np.average(rates, weights=fading)) for rates in (was, came))
        short = came - (mean_came + slope * (was - mean_was))
        forecast = max(0.0, mean_came + slope * (present - mean_was))
        independent = float((fading * self.lengths_s[at]).sum()) / (lead_s + span_s)
        drift = forecast * DRIFT * math.sqrt(lead_s / _MINUTE_S)
        seen, bound = _quantile(short, weights, share), _conformal(short, weights, share, independent, drift)
        return Covered(forecast, forecast + max(0.0, seen, bound))


def _slope(given: Floats, outcomes: Floats, weights: Floats) -> float:
    """Slope of the regression line of `outcomes` on `given`, within 0 and 1; 1 when `given` does not vary."""
    given = given - np.average(given, weights=weights)
    outcomes = outcomes - np.average(outcomes, weights=weights)
    spread = float(np.average(given * given, weights=weights))
    if spread <= 0:
        return 1.0
    return min(1.0, max(0.0, float(np.average(given * outcomes, weights=weights)) / spread))


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    """The value that `share` of the weight does not exceed; 0 when all weights are 0."""
    total = float(weights.sum())
    if total <= 0:
        return 0.0
    order = np.argsort(values)
    reached = np.searchsorted(np.cumsum(weights[order]), share * total - 1e-9)
    return float(values[order][min(int(reached), values.size - 1)])


def _conformal(values: Floats, weights: Floats, share: float, independent: float, drift: float) -> float:
    """The bound that the next error keeps in `share` of all cases, by weighted conformal prediction.

    Errors over one lead overlap: they count as `independent` ones. The method adds the next error as one of infinite
    size (Tibshirani, Foygel Barber, Candès and Ramdas, "Conformal prediction under covariate shift", NeurIPS 2019).
    Here it has the sizes of a random walk with standard deviation `drift` instead, so that few errors give a bound,
    too. The longer the lead, the fewer errors are known and the further demand drifts. 0 when all weights are 0.
    """
    total = float(weights.sum())
    if total <= 0:
        return 0.0
    sizes = np.concatenate((values, drift * _DRIFTS))
    return _quantile(
        sizes,
        np.concatenate((weights * (independent / total), np.full(_DRIFTS.size, 1 / _DRIFTS.size))),
        share,
    )


def measure(
    arrivals: Sequence[ArrivalBucket], amount: Amount, now_s: float, lead_s: float, tuning: SloTuning
) -> DemandForecast | None:
    """The demand as recorded until now; None without a record."""
    begin = now_s - tuning.history_s
    kept = [bucket for bucket in arrivals if begin <= bucket.start_s < now_s]
    if not kept:
        return None
    amounts = np.array([amount(bucket) for bucket in kept], dtype=np.float64)
    ends = np.array([min(bucket.start_s + bucket.length_s, now_s) for bucket in kept])
    lengths = ends - np.array([bucket.start_s for bucket in kept])
    requests = np.array([bucket.requests for bucket in kept], dtype=np.float64)
    ages = now_s - ends
    slow, noise = _mean(amounts, lengths, ages, 0.0, tuning.window_s)
    before, _ = _mean(amounts, lengths, ages, tuning.window_s, 2 * tuning.window_s)
    # The fast rate shows a step of the demand within a sixth of the window. Arrivals are counted by the second.
    fast, _ = _mean(amounts, lengths, ages, 0.0, max(1.0, tuning.window_s / 6))
    covered_s, growth = now_s - kept[0].start_s, 1.0
    if covered_s >= 2 * tuning.window_s and before > 0:
        rise = max(0.0, slow - before - GROWTH_NOISE * math.sqrt(2) * noise)
        growth = 1 + min(GROWTH_LIMIT, rise / before * lead_s / tuning.window_s)
    fading = np.exp(-ages / (tuning.history_s / 2))
    return DemandForecast(
        amounts,
        lengths,
        requests * fading,
        fading,
        slow,
        noise,
        fast,
        growth,
        covered_s,
        covered_s >= min(tuning.settle_s, tuning.history_s),
    )


def _mean(
    amounts: Floats, lengths_s: Floats, ages_s: Floats, youngest_s: float, oldest_s: float
) -> tuple[float, float]:
    """Mean rate between two ages, and the standard error that it has if buckets are independent."""
    inside = (ages_s >= youngest_s - 1e-6) & (ages_s < oldest_s - 1e-6)
    span = float(lengths_s[inside].sum())
    if span <= 0:
        return 0.0, 0.0
    return float(amounts[inside].sum()) / span, float(amounts[inside].std()) * math.sqrt(
        int(inside.sum())
    ) / span
