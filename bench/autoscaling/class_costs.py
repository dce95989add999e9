"""`python -m bench.autoscaling.class_costs`: what a mix of two replica classes costs, and each of them alone, in
simulation.

The engine is `h100-8b`. A large replica does the work of `--speed` small ones for `--price` times the price of one. The
default policy is the same in all runs; where one class is alone, its replicas are the policy's units.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.evaluation.class_costs import RunCost, cost_of
from autoscaler.simulation.evaluation.comparison import run_policy
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.scaling import scaled_to_peak
from autoscaler.simulation.traces.trace import Trace, load_trace
from autoscaler.sizing.engine_model import preset
from bench.option_values import positive_number

SLO = Slo(2.0, 0.1)
COLD_START_S = 60.0
SMALL_PRICE = 1.0


@dataclass(frozen=True, slots=True)
class PricedRun:
    """One choice of classes."""

    name: str
    outcome: Outcome
    cost: RunCost

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"run": self.name, "attainment": round(self.outcome.attainment, 5), **self.cost.to_json()}


def policy_of(classes: Sequence[dict[str, Any]], most: int) -> ScalingPolicy:
    """The default policy over these classes in both pools."""
    pool = {"max_replicas": most, "cold_start_s": COLD_START_S, "classes": classes}
    targets = {"prefill": SLO.ttft_s * 1e3, "decode": SLO.tpot_s * 1e3}
    return parse_policy({name: {**pool, "target_ms": target} for name, target in targets.items()})


def runs(trace: Trace, speed: float, price: float, most: int) -> list[PricedRun]:
    """The mix, and each class alone."""
    engine = preset("h100-8b")
    scenario = Scenario(trace, engine, SLO, COLD_START_S)
    large_engine = engine.at_speed("prefill", speed).at_speed("decode", speed)
    small = {"name": "small", "price_per_hour": SMALL_PRICE, "max_replicas": most}
    large = {"name": "large", "price_per_hour": price, "max_replicas": most}
    cases = {
        "small and large": (scenario, [small, {**large, "speed": speed}]),
        "small": (scenario, [small]),
        "large": (replace(scenario, engine=large_engine), [large]),
    }
    found = []
    for name, (where, classes) in cases.items():
        policy = policy_of(classes, most)
        outcome = run_policy(where, policy)
        cost = cost_of(outcome, policy)
        assert cost is not None
        found.append(PricedRun(name, outcome, cost))
    return found


def main() -> int:
    """Prints a line for each choice."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling.class_costs", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a published trace")
    parser.add_argument(
        "--minutes", type=positive_number, default=60.0, help="only the first minutes of the trace"
    )
    parser.add_argument(
        "--peak", type=positive_number, default=16.0, help="small replicas that the busiest minute fills"
    )
    parser.add_argument(
        "--speed", type=positive_number, default=4.0, help="small replicas that a large one replaces"
    )
    parser.add_argument(
        "--price", type=positive_number, default=3.2, help="price of a large one; a small one costs 1"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    whole = load_trace(given.trace, 0)
    cut = Trace(whole.name, [one for one in whole.requests if one.arrival_s < given.minutes * 60])
    trace = scaled_to_peak(cut, given.peak, preset("h100-8b"), SLO.tpot_s, 0)
    found = runs(trace, given.speed, given.price, max(8, round(4 * given.peak)))
    if given.json:
        sys.stdout.write(f"{json.dumps([one.to_json() for one in found])}\n")
        return 0
    sys.stdout.write(f"{trace.name}: {len(trace.requests):,} requests, {trace.duration_s / 60:.0f} min\n")
    for one in found:
        hours = ", ".join(f"{c.replica_hours:.2f} h {c.pool} {c.name}" for c in one.cost.classes)
        sys.stdout.write(
            f"{one.name:>16}: {one.outcome.attainment:.2%} attained, {one.cost.money:.2f}, "
            f"{one.outcome.failed_requests} failed ({hours})\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
