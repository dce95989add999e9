"""Runs an opponent on a scenario."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, static_replicas
from autoscaler.simulation.traces.scaling import PEAK_WINDOW_S
from bench.autoscaling.opponents.baselines import (
    STATIC_BEST,
    STATIC_PEAK,
    Knobs,
    RuleInputs,
    baseline,
    mean_work_s,
    peak_within,
)
from bench.autoscaling.opponents.clairvoyant import GRID_S, needs
from bench.autoscaling.opponents.static_search import best_static
from splitserve.roles import POOLS, PoolName

DEFAULT_SHARE = 0.97
_SPARE = 2
"""Replicas of each pool beyond those of `static-peak` among which the best static counts are sought."""


def run_baseline(
    scenario: Scenario,
    name: str,
    bounds: Mapping[PoolName, PoolPolicy],
    knobs: Knobs | None = None,
    share: float = DEFAULT_SHARE,
) -> Outcome:
    """Runs one baseline within the bounds of the policy, tuned by `knobs`. `share`: what `static-best` must attain.
    None goes to zero: they know no way from there."""
    bounds = {
        pool: PoolPolicy(min_replicas=max(1, of_pool.min_replicas), max_replicas=of_pool.max_replicas)
        for pool, of_pool in bounds.items()
    }
    if name in (STATIC_PEAK, STATIC_BEST):
        peak = static_peak(scenario)
        if name == STATIC_BEST:
            ample = {pool: count + _SPARE for pool, count in peak.items()}
            return best_static(scenario, share, peak_within(ample, bounds))
        counts = peak_within(peak, bounds)
        scenario = replace(scenario, initial=counts)
        decide, interval_s = static_replicas(counts), GRID_S
    else:
        work_s = mean_work_s(scenario.trace.requests, scenario.engine, scenario.slo.tpot_s)
        rule = baseline(name, RuleInputs(scenario.slo, scenario.engine, bounds, work_s), knobs)
        decide, interval_s = rule.decide, rule.interval_s
    return Simulation(scenario, decide, interval_s, bounds, name).run()


def static_peak(scenario: Scenario) -> dict[PoolName, int]:
    """Replicas for the busiest minute, with square-root staffing."""
    replicas: dict[PoolName, int] = {}
    width = max(1, round(PEAK_WINDOW_S / GRID_S))
    for pool, need in needs(scenario).items():
        window = min(width, len(need))
        peak = float(np.convolve(need, np.ones(window) / window, "valid").max())
        replicas[pool] = max(1, math.ceil(peak + math.sqrt(peak)))
    return {pool: replicas[pool] for pool in POOLS}
