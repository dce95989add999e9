"""The candidates of a sizing: fixed numbers of split or of colocated workers, each replayed on the trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, static_replicas
from splitserve.roles import PoolName

_INTERVAL_S = 15.0
_LONG_S = 86_400.0
_LIKE = 0.005
"""Attainments this close count as equal."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Numbers of workers: split into two pools, or colocated, each of role `both`."""

    prefill: int
    decode: int
    both: int = 0

    @property
    def kind(self) -> Literal["split", "colocated"]:
        """The cluster's kind, as reports name it."""
        return "colocated" if self.both else "split"

    @property
    def name(self) -> str:
        """The cluster's name in tables."""
        return f"colocated {self.both}" if self.both else f"{self.prefill}P:{self.decode}D"

    @property
    def workers(self) -> int:
        """Workers of all roles."""
        return self.prefill + self.decode + self.both

    @property
    def apply(self) -> str:
        """The command that starts a cluster like this."""
        if self.both:
            return f"splitserve up --workers {self.both}"
        return f"splitserve up --prefill {self.prefill} --decode {self.decode}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's result for a candidate. Latencies in seconds; None without any."""

    candidate: ClusterShape
    attainment: float
    attainment_ttft: float
    attainment_tpot: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    failed_requests: int
    strain: float
    """Mean of TTFT and TPOT, each as its 95th percentile over its target: less is better."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        shape = self.candidate
        return {"name": shape.name, "kind": shape.kind, "apply": shape.apply, **asdict(self)}


def predicted(candidate: ClusterShape, scenario: Scenario) -> Prediction:
    """Replays the scenario's trace on the candidate's workers."""
    counts: dict[PoolName, int] = {"prefill": candidate.prefill, "decode": candidate.decode}
    scenario = replace(scenario, initial=counts, both=candidate.both)
    # Decisions never change here. In long traces they are rarer, so that they do not take longer than the requests.
    interval_s = _INTERVAL_S * max(1, math.ceil(scenario.trace.duration_s / _LONG_S))
    outcome = Simulation(scenario, static_replicas(counts), interval_s, name=candidate.name).run()
    phases, slo = outcome.phases(), outcome.slo
    ttft, tpot = phases["ttft"].get("p95"), phases["tpot"].get("p95")
    return Prediction(
        candidate=candidate,
        attainment=outcome.attainment,
        attainment_ttft=outcome.attainment_ttft,
        attainment_tpot=outcome.attainment_tpot,
        ttft_p95_s=ttft,
        tpot_p95_s=tpot,
        failed_requests=outcome.failed_requests,
        strain=((ttft or 0.0) / slo.ttft_s + (tpot or 0.0) / slo.tpot_s) / 2,
    )


def ranked(predictions: Sequence[Prediction], goal: float) -> list[Prediction]:
    """The best first: predictions that reach the goal by their number of workers, then the others by attainment. Of
    equal ones the first is the one that attains more, then the one with lower latencies."""

    def key(prediction: Prediction) -> tuple[float, ...]:
        attained, workers = round(prediction.attainment / _LIKE), prediction.candidate.workers
        if prediction.attainment >= goal:
            return 0, workers, -attained, prediction.strain
        return 1, -attained, workers, prediction.strain

    return sorted(predictions, key=key)
