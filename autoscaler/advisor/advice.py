"""Replays a trace on every candidate within a budget of workers, and says which to take.

The best is the cheapest candidate that keeps enough requests within their targets; if none does, that which keeps most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autoscaler.advisor.candidates import ClusterShape, adaptive, colocated, replay, splits
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from splitserve.errors import InvalidArgumentError

MAX_BUDGET = 64
_LIKE = 0.005
"""Attainments this close count as equal."""
_SAME_COST = 0.02
"""Costs that differ by less than this share of the highest one count as equal."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a candidate. Latencies in seconds, None without any."""

    candidate: ClusterShape
    attainment: float
    attainment_ttft: float
    attainment_tpot: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    worker_hours: float
    """Without the idle prefill worker of a colocated cluster."""
    failed_requests: int
    strain: float
    """95th percentiles of both latencies over their targets, the mean of the two: less is better."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.candidate.name, "apply": self.candidate.apply, **asdict(self)}


@dataclass(frozen=True, slots=True)
class AdviceTerms:
    """What is wanted of an advice."""

    budget: int
    goal: float = 0.95
    """Share of requests within both targets."""
    fewer_workers: bool = True
    """Whether smaller clusters are tried once one within the budget reaches the goal."""
    limit_s: float = 300.0
    """Time for all replays; candidates that it does not suffice for are left out."""

    def __post_init__(self) -> None:
        if not 2 <= self.budget <= MAX_BUDGET:
            message = f"budget must be 2..{MAX_BUDGET} workers, not {self.budget}"
            raise InvalidArgumentError(message, field="budget")
        if not 0 < self.goal <= 1:
            message = f"goal must be above 0 and at most 1, not {self.goal:g}"
            raise InvalidArgumentError(message, field="goal")


@dataclass(slots=True)
class Advice:
    """All predictions, the best first."""

    terms: AdviceTerms
    predictions: list[Prediction] = field(default_factory=list)
    left_out: int = 0
    """Candidates that were not replayed for want of time."""

    @property
    def best(self) -> Prediction:
        """The one to take."""
        return self.predictions[0]

    @property
    def next_best(self) -> Prediction | None:
        """The second one."""
        return self.predictions[1] if len(self.predictions) > 1 else None

    @property
    def margin(self) -> float:
        """Attainment of the best less that of the next best. Negative: the next best attains more, and costs more."""
        return 0.0 if self.next_best is None else self.best.attainment - self.next_best.attainment

    @property
    def reason(self) -> str:
        """One sentence: which to take, and why."""
        best, other, goal = self.best, self.next_best, self.terms.goal
        if best.attainment < goal:
            why = f"no candidate keeps {goal:.0%} of the requests within the targets, and it keeps most"
        elif other is None or other.attainment < goal:
            why = f"it alone keeps {goal:.0%} of the requests within the targets"
        elif other.worker_hours > best.worker_hours * (1 + _SAME_COST):
            saved = 1 - best.worker_hours / other.worker_hours
            why = f"it keeps {goal:.0%} within the targets with {saved:.0%} fewer worker-hours than the next best"
        elif self.margin > _LIKE:
            why = "of the cheapest that reach the goal it keeps most requests within the targets"
        else:
            why = f"it is the simplest or quickest of those that reach the goal; {other.candidate.name} is as good"
        return f"Take {best.candidate.name}: {why} ({best.attainment:.1%} predicted)."

    def to_json(self) -> dict[str, Any]:
        """Plain values, the best first."""
        return {
            "best": self.best.to_json(),
            "margin": round(self.margin, 5),
            "reason": self.reason,
            "left_out": self.left_out,
            "candidates": [prediction.to_json() for prediction in self.predictions],
        }


def advise(
    scenario: Scenario,
    terms: AdviceTerms,
    on_replayed: Callable[[ClusterShape, int, int], None] | None = None,
) -> Advice:
    """Replays the scenario on the candidates. `on_replayed` is told each one, how many are done and of how many."""
    advice, began = Advice(terms), time.monotonic()
    first = [colocated(terms.budget), *splits(terms.budget, scenario), adaptive(terms.budget, scenario)]

    def tried(candidate: ClusterShape) -> Prediction | None:
        if advice.predictions and time.monotonic() - began > terms.limit_s:
            advice.left_out += 1
            return None
        prediction = predicted(candidate, replay(candidate, scenario))
        advice.predictions.append(prediction)
        if on_replayed is not None:
            on_replayed(candidate, len(advice.predictions), max(len(first), len(advice.predictions)))
        return prediction

    for candidate in first:
        tried(candidate)
    if terms.fewer_workers:
        for kind in ("split", "colocated"):
            ofkind = [one for one in advice.predictions if one.candidate.kind == kind]
            if ofkind:
                _shrink(ranked(ofkind, terms.goal)[0], terms.goal, tried)
    advice.predictions = ranked(advice.predictions, terms.goal)
    return advice


def predicted(candidate: ClusterShape, outcome: Outcome) -> Prediction:
    """The prediction that a replay makes."""
    phases, slo = outcome.phases(), outcome.slo
    ttft, tpot = phases["ttft"].get("p95"), phases["tpot"].get("p95")
    hours = outcome.total_replica_hours
    if candidate.kind == "colocated":
        hours = outcome.replica_hours["decode"]
    return Prediction(
        candidate=candidate,
        attainment=outcome.attainment,
        attainment_ttft=outcome.attainment_ttft,
        attainment_tpot=outcome.attainment_tpot,
        ttft_p95_s=ttft,
        tpot_p95_s=tpot,
        worker_hours=hours,
        failed_requests=outcome.failed_requests,
        strain=((ttft or 0.0) / slo.ttft_s + (tpot or 0.0) / slo.tpot_s) / 2,
    )


def ranked(predictions: Sequence[Prediction], goal: float) -> list[Prediction]:
    """The best first: those that reach the goal by cost, the others by attainment. Of equal ones those come first whose
    number of workers does not change, then those with lower latencies."""
    highest = max((one.worker_hours for one in predictions), default=1.0) or 1.0

    def key(one: Prediction) -> tuple[float, ...]:
        attained, cost = round(one.attainment / _LIKE), round(one.worker_hours / highest / _SAME_COST)
        changes = one.candidate.kind == "adaptive"
        if one.attainment >= goal:
            return 0, cost, -attained, changes, one.strain
        return 1, -attained, cost, changes, one.strain

    return sorted(predictions, key=key)


def _shrink(best: Prediction, goal: float, tried: Callable[[ClusterShape], Prediction | None]) -> None:
    """Takes workers away one by one, from the pool that misses them less, as long as the goal is reached."""
    while best.attainment >= goal:
        fewer = [one for smaller in _smaller(best.candidate) if (one := tried(smaller)) is not None]
        if not fewer:
            return
        best = ranked(fewer, goal)[0]


def _smaller(candidate: ClusterShape) -> Iterator[ClusterShape]:
    if candidate.kind == "split" and candidate.prefill > 1:
        yield ClusterShape("split", candidate.prefill - 1, candidate.decode)
    if candidate.decode > 1:
        yield ClusterShape(candidate.kind, candidate.prefill, candidate.decode - 1)
