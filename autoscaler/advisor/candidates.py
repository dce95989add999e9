"""What the advisor compares: fixed splits of the workers, colocated workers, and the adaptive policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoscaler.decide import make_decide
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.evaluation.baselines import static_replicas
from autoscaler.simulation.evaluation.comparison import bounds_of
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.scaling import pool_work_s
from autoscaler.snapshot import PoolName

_LONG_S = 86_400.0
ShapeKind = Literal["split", "colocated", "adaptive"]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A way to use workers. Adaptive: `prefill` and `decode` are those at the start, `budget` the most of both."""

    kind: ShapeKind
    prefill: int
    decode: int
    budget: int = 0

    @property
    def name(self) -> str:
        """As tables show it."""
        match self.kind:
            case "split":
                return f"{self.prefill}P:{self.decode}D"
            case "colocated":
                return f"colocated {self.decode}"
        return f"adaptive, up to {self.budget}"

    @property
    def workers(self) -> int:
        """Workers that compute."""
        return self.budget or self.prefill + self.decode

    @property
    def apply(self) -> str:
        """The command that starts a cluster like this."""
        match self.kind:
            case "split":
                return f"splitserve up --prefill {self.prefill} --decode {self.decode} --hybrid off"
            case "colocated":
                pools = f"--prefill 1 --prefill-gpus 0 --decode {self.decode}"
                return f"splitserve up {pools} --local-prefill always --admission off"
        return "splitserve up --autoscale policy.yaml"


def splits(budget: int, scenario: Scenario) -> list[ClusterShape]:
    """All splits of the budget, those first that divide it as the trace's work is divided."""
    ideal = budget * prefill_share(scenario)
    found = [ClusterShape("split", prefill, budget - prefill) for prefill in range(1, budget)]
    return sorted(found, key=lambda one: abs(one.prefill - ideal))


def colocated(budget: int) -> ClusterShape:
    """All workers compute prompts and decode."""
    return ClusterShape("colocated", 0, budget)


def adaptive(budget: int, scenario: Scenario) -> ClusterShape:
    """The default policy within the budget, from the split at which the trace's work is divided."""
    prefill = min(budget - 1, max(1, round(budget * prefill_share(scenario))))
    return ClusterShape("adaptive", prefill, budget - prefill, budget)


def prefill_share(scenario: Scenario) -> float:
    """Share of prefill in the work of a trace, 0..1: seconds of a full replica."""
    prefill, decode = pool_work_s(scenario.trace.requests, scenario.engine, scenario.slo.tpot_s)
    return prefill / (prefill + decode) if prefill + decode > 0 else 0.5


def policy_values(budget: int, slo: Slo) -> dict[str, Any]:
    """The content of the policy file of the adaptive candidate."""
    most = max(1, budget - 1)
    return {
        "gpu_budget": budget,
        "prefill": {"kind": "slo", "target_ms": slo.ttft_s * 1e3, "max_replicas": most},
        "decode": {"kind": "slo", "target_ms": slo.tpot_s * 1e3, "max_replicas": most},
    }


def replay(candidate: ClusterShape, scenario: Scenario) -> Outcome:
    """Replays the scenario's trace on the candidate's workers."""
    counts: Mapping[PoolName, int] = {"prefill": max(1, candidate.prefill), "decode": candidate.decode}
    scenario = replace(scenario, initial=counts)
    if candidate.kind == "colocated":
        # Admission counts the capacity of the prefill pool, which has nothing to do here.
        scenario = replace(scenario, colocated=True, admission=None)
    policy: ScalingPolicy = parse_policy(policy_values(max(2, candidate.workers), scenario.slo))
    if candidate.kind != "adaptive":
        # The same interval for all: a run, and with it its cost, lasts for whole intervals. Longer ones only where
        # looking at what never changes would take longer than the requests.
        interval_s = policy.interval_s * max(1, math.ceil(scenario.trace.duration_s / _LONG_S))
        return Simulation(scenario, static_replicas(counts), interval_s, name=candidate.name).run()
    decide, bounds = make_decide(policy), bounds_of(policy)
    return Simulation(scenario, decide, policy.interval_s, bounds, candidate.name).run()
