"""Runs a policy, the baselines and the clairvoyant bound on one scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import Bounds
from autoscaler.simulation.evaluation.baselines import (
    BASELINES,
    STATIC_BEST,
    STATIC_NEUTRAL,
    STATIC_PEAK,
    Knobs,
    RuleInputs,
    baseline,
    mean_work_s,
    peak_within,
    static_replicas,
)
from autoscaler.simulation.evaluation.clairvoyant import GRID_S, Bound, clairvoyant_bound, needs
from autoscaler.simulation.evaluation.class_costs import RunCost, cost_of, speeds_of, spot_of
from autoscaler.simulation.evaluation.static_search import best_static
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.scaling import PEAK_WINDOW_S
from autoscaler.snapshot import POOLS, PoolName
from autoscaler.start_watch import start_limits
from splitserve.errors import InvalidArgumentError
from splitserve.models.sources import Progress

POLICY_NAME = "policy"
DEFAULT_SHARE = 0.97
_SPARE = 2
"""Replicas of each pool beyond those of `static-peak` among which the best static counts are sought."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of one scenario."""

    policy: Outcome
    others: Sequence[Outcome] = ()
    bound: Bound | None = None
    cost: RunCost | None = None
    """Of the policy's run, where its replicas have classes."""

    def to_json(self) -> dict[str, Any]:
        """The policy's run as JSON, with those of the baselines and of the bound."""
        hours = self.bound.replica_hours if self.bound else None
        return {
            **self.policy.to_json(),
            "replica_hours_bound": None if hours is None else round(hours, 4),
            "replica_hours_over_bound": round(self.policy.total_replica_hours / hours, 4) if hours else None,
            "bound": self.bound.outcome.to_json() if self.bound else None,
            "opponents": {other.name: other.to_json() for other in self.others},
            **({"cost": self.cost.to_json()} if self.cost else {}),
        }


def compare(
    scenario: Scenario,
    policy: ScalingPolicy,
    names: Sequence[str] = (),
    bound_share: float | None = None,
    on_progress: Progress = lambda *_: None,
) -> Comparison:
    """Runs the policy, these baselines (see `baseline_names`), and with `bound_share` the search for the bound."""
    run = run_policy(scenario, policy, partial(on_progress, POLICY_NAME))
    bounds, share = bounds_of(policy), DEFAULT_SHARE if bound_share is None else bound_share
    others = [run_baseline(scenario, name, bounds, None, share, on_progress) for name in names]
    bound = clairvoyant_bound(scenario, bound_share, on_progress) if bound_share is not None else None
    return Comparison(run, others, bound, cost_of(run, policy))


def run_policy(
    scenario: Scenario, policy: ScalingPolicy, on_progress: Callable[[float], None] = lambda _: None
) -> Outcome:
    """Runs the policy under the control loop's watch over starts, with the classes of replicas that it has."""
    scenario = under(scenario, policy)
    bounds, decide, starts = bounds_of(policy), make_decide(policy), start_limits(policy)
    return Simulation(
        scenario, decide, policy.interval_s, bounds, POLICY_NAME, on_progress, starts=starts
    ).run()


def under(scenario: Scenario, policy: ScalingPolicy) -> Scenario:
    """With the kind of workers and the classes of replicas that the policy has."""
    neutral = policy.workers == "neutral"
    return replace(scenario, speeds=speeds_of(policy), spot=spot_of(policy), neutral=neutral)


def run_baseline(
    scenario: Scenario,
    name: str,
    bounds: Mapping[PoolName, Bounds],
    knobs: Knobs | None = None,
    share: float = DEFAULT_SHARE,
    on_progress: Progress = lambda *_: None,
) -> Outcome:
    """Runs one baseline within the bounds of the policy, tuned by `knobs`. `share`: what `static-best` must attain.
    None goes to zero: they know no way from there."""
    bounds = {pool: Bounds(max(1, each.min), each.max) for pool, each in bounds.items()}
    acts = name != STATIC_NEUTRAL
    if name in (STATIC_PEAK, STATIC_NEUTRAL, STATIC_BEST):
        peak = static_peak(scenario)
        if name == STATIC_BEST:
            ample = {pool: count + _SPARE for pool, count in peak.items()}
            return best_static(scenario, share, peak_within(ample, bounds), on_progress)
        counts = peak_within(peak, bounds)
        scenario = replace(scenario, initial=counts, neutral=not acts)
        decide, interval_s = static_replicas(counts), GRID_S
    else:
        work_s = mean_work_s(scenario.trace.requests, scenario.engine, scenario.slo.tpot_s)
        rule = baseline(name, RuleInputs(scenario.slo, scenario.engine, bounds, work_s), knobs)
        decide, interval_s = rule.decide, rule.interval_s
    progress = partial(on_progress, name)
    return Simulation(scenario, decide, interval_s, bounds, name, progress, acts=acts).run()


def bounds_of(policy: ScalingPolicy) -> dict[PoolName, Bounds]:
    """Minimum and maximum of both pools."""
    return {
        "prefill": Bounds(policy.prefill.min_replicas, policy.prefill.max_replicas),
        "decode": Bounds(policy.decode.min_replicas, policy.decode.max_replicas),
    }


def static_peak(scenario: Scenario) -> dict[PoolName, int]:
    """Replicas for the busiest minute, with square-root staffing."""
    found: dict[PoolName, int] = {}
    width = max(1, round(PEAK_WINDOW_S / GRID_S))
    for pool, need in needs(scenario).items():
        window = min(width, len(need))
        peak = float(np.convolve(need, np.ones(window) / window, "valid").max())
        found[pool] = max(1, math.ceil(peak + math.sqrt(peak)))
    return {pool: found[pool] for pool in POOLS}


def baseline_names(wanted: Sequence[str]) -> list[str]:
    """The baselines to run; `all` expands to all of one run each with pinned replicas.
    Raises InvalidArgumentError for an unknown name."""
    names: list[str] = []
    for name in wanted:
        single = (STATIC_BEST, STATIC_NEUTRAL)
        if name != "all" and name not in (*BASELINES, *single):
            known = ", ".join(("all", *BASELINES, *single))
            raise InvalidArgumentError(f"baseline: no such baseline: {name!r} ({known})", field="baseline")
        names += BASELINES if name == "all" else [name]
    return list(dict.fromkeys(names))
