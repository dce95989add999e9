"""The fewest replicas that keep a traffic's targets: of two pools, and of colocated ones.

Each trial is a replay of the trace on fixed replicas behind the production router. The search
begins where the work of the trace just fits, adds replicas until the goal is reached, and takes away as long as it
stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.scaling import pool_work_s
from autoscaler.sizing.candidates import ClusterShape, Prediction, predicted, ranked
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

MAX_REPLICAS = 1024
STEADY_BUSY = 0.95
"""Of traffic at random, queues of a busier pool grow for longer than any trace that one replays."""
_PLATEAU = 0.002
"""A pool that is given more replicas and attains less than this share more is not what holds the requests back."""
_PATIENCE = 2
"""Twice as many colocated replicas that attain no more: what is missing is not replicas."""
_NEAR = 0.5
"""From this attainment on replicas are added in small steps."""
_SOME = 0.1
"""Below this attainment a cluster is overloaded, and a few replicas more may show nothing yet."""


@dataclass(frozen=True, slots=True)
class SizingTerms:
    """What is wanted of a sizing."""

    goal: float = 0.95
    """Share of requests within both targets."""
    max_replicas: int = 256
    """Of both pools together."""
    steady: bool = False
    """Whether the traffic goes on like this: no pool may then have work for more than `STEADY_BUSY` of its time, even
    if the trace ends before that shows."""
    limit_s: float = 120.0
    """For all replays, about."""

    def __post_init__(self) -> None:
        if not 0 < self.goal <= 1:
            message = f"goal must be above 0 and at most 1, not {self.goal:g}"
            raise InvalidArgumentError(message, field="goal")
        if not 2 <= self.max_replicas <= MAX_REPLICAS:
            message = f"max_replicas must be 2..{MAX_REPLICAS}, not {self.max_replicas}"
            raise InvalidArgumentError(message, field="max_replicas")


@dataclass(frozen=True, slots=True)
class Sizing:
    """What was found; None: nothing within the bounds reached the goal."""

    split: Prediction | None
    colocated: Prediction | None
    replays: Sequence[Prediction]
    out_of_time: bool
    goal: float

    @property
    def best(self) -> Prediction:
        """The one with fewer replicas; of equal ones that which attains more, then the quicker one."""
        return ranked([one for one in (self.split, self.colocated) if one is not None], self.goal)[0]

    def closest(self, kind: str) -> Prediction | None:
        """Of the clusters of a kind that were replayed, the one that attains most."""
        ofkind = [one for one in self.replays if one.candidate.kind == kind]
        return max(ofkind, key=lambda one: one.attainment, default=None)


def idle_share(scenario: Scenario) -> float:
    """Share of requests that an idle replica serves within both targets: no number of replicas does better."""
    engine, slo, met = scenario.engine, scenario.slo, 0
    for request in scenario.trace.requests:
        context = request.prompt_tokens + request.output_tokens / 2
        quick = engine.request_s + engine.prompt_s(request.prompt_tokens) <= slo.ttft_s
        met += quick and (request.output_tokens < 2 or engine.decode.decode_step_s(1, context) <= slo.tpot_s)
    return met / max(1, len(scenario.trace.requests))


def least_replicas(scenario: Scenario) -> int:
    """Colocated replicas whose time the work of the trace just fills: steady traffic needs no fewer of any kind."""
    trace = scenario.trace
    work = sum(pool_work_s(trace.requests, scenario.engine, scenario.slo.tpot_s))
    return max(1, math.ceil(work / max(trace.duration_s, 1e-3)))


def size(
    scenario: Scenario, terms: SizingTerms, on_replayed: Callable[[ClusterShape], None] | None = None
) -> Sizing:
    """Searches both kinds. `on_replayed` is told each cluster.

    Raises FailedPreconditionError: TOO_SLOW if not even idle replicas reach the goal, GOAL_NOT_REACHED if no number of
    replicas within the bounds does.
    """
    share = idle_share(scenario)
    if share < terms.goal:
        message = (
            f"even an idle replica keeps only {share:.1%} of the requests within {scenario.slo.ttft_s * 1e3:g} ms TTFT "
            f"and {scenario.slo.tpot_s * 1e3:g} ms TPOT; the goal is {terms.goal:.1%}"
        )
        raise FailedPreconditionError(message, reason="TOO_SLOW", field="goal")
    search = _Search(scenario, terms, on_replayed)
    split, colocated = search.split(), search.colocated()
    if split is None and colocated is None:
        nearest = max(search.done.values(), key=lambda one: one.attainment, default=None)
        found = (
            f"{nearest.candidate.name} keeps {nearest.attainment:.1%}"
            if nearest
            else "its work alone is more"
        )
        why = "tried within --limit" if search.out_of_time else f"up to {terms.max_replicas}"
        message = (
            f"no number of replicas {why} keeps {terms.goal:.1%} of the requests within the targets; {found}"
        )
        raise FailedPreconditionError(message, reason="GOAL_NOT_REACHED", field="goal")
    return Sizing(split, colocated, list(search.done.values()), search.out_of_time, terms.goal)


@dataclass(slots=True)
class _Search:
    scenario: Scenario
    terms: SizingTerms
    on_replayed: Callable[[ClusterShape], None] | None = None
    done: dict[ClusterShape, Prediction] = field(default_factory=dict)
    out_of_time: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def split(self) -> Prediction | None:
        """The fewest replicas of two pools."""
        prefill, decode = (max(1, math.ceil(work - 1e-9)) for work in self._work())
        floor = prefill, decode
        best = self._grown(ClusterShape(*floor))
        if best is None:
            return None
        least = floor if self.terms.steady else (1, 1)
        best = self._shrunk(best, least)
        while (better := self._exchanged(best, least)) is not None:
            best = better
        return best

    def colocated(self) -> Prediction | None:
        """The fewest replicas that compute prompts and decode."""
        floor = max(1, math.ceil(sum(self._work()) - 1e-9))
        below, count = (floor if self.terms.steady else 1) - 1, floor
        most, most_at = -1.0, count
        while (found := self._tried(ClusterShape(0, 0, count))) is not None:
            if found.attainment >= self.terms.goal:
                break
            if found.attainment >= most + _PLATEAU:
                most, most_at = found.attainment, count
            elif count >= _PATIENCE * most_at and most > _SOME:
                return None  # more replicas are no help
            below, count = count, max(count + 1, math.ceil(count * 1.25))
        while found is not None and count - below > 1:
            middle = count - 1 if below < floor else (below + count) // 2
            trial = self._tried(ClusterShape(0, 0, middle))
            if trial is None:
                break
            if trial.attainment >= self.terms.goal:
                found, count = trial, middle
            else:
                below = middle
        return found

    def _tried(self, shape: ClusterShape) -> Prediction | None:
        """The replay of a shape, once; None beyond the bounds."""
        if shape in self.done:
            return self.done[shape]
        if shape.workers > self.terms.max_replicas:
            return None
        if self.done and time.monotonic() - self.began_s > self.terms.limit_s:
            self.out_of_time = True
            return None
        self.done[shape] = predicted(shape, self.scenario)
        if self.on_replayed is not None:
            self.on_replayed(shape)
        return self.done[shape]

    def _passing(self, shape: ClusterShape) -> Prediction | None:
        prediction = self._tried(shape)
        return prediction if prediction is not None and prediction.attainment >= self.terms.goal else None

    def _work(self) -> tuple[float, float]:
        """Replicas of each pool, in fractions, whose time the work of the trace just fills, as far as it may."""
        trace = self.scenario.trace
        work = pool_work_s(trace.requests, self.scenario.engine, self.scenario.slo.tpot_s)
        length_s = max(trace.duration_s, 1e-3) * (STEADY_BUSY if self.terms.steady else 1.0)
        return work[0] / length_s, work[1] / length_s

    def _grown(self, shape: ClusterShape) -> Prediction | None:
        now = self._tried(shape)
        while now is not None and now.attainment < self.terms.goal:
            prefill, decode = now.candidate.prefill, now.candidate.decode
            # Far from the goal in larger steps; `_shrunk` takes back what was too much.
            part = 8 if now.attainment >= _NEAR else 3
            more, wider = prefill + max(1, prefill // part), decode + max(1, decode // part)
            one_pool = (ClusterShape(more, decode), ClusterShape(prefill, wider))
            nexts = [found for each in one_pool if (found := self._tried(each)) is not None]
            best = max(nexts, key=lambda one: (one.attainment, -one.strain), default=None)
            if best is None or best.attainment < now.attainment + _PLATEAU:
                best = self._tried(ClusterShape(more, wider))
            now = best
        return now

    def _shrunk(self, best: Prediction, least: tuple[int, int]) -> Prediction:
        step = max(1, max(best.candidate.prefill, best.candidate.decode) // 4)
        while step:
            fewer = [
                found
                for shape in _less(best.candidate, step, least)
                if (found := self._passing(shape)) is not None
            ]
            if fewer:
                best = max(fewer, key=lambda one: (one.attainment, -one.strain))
            else:
                step //= 2
        return best

    def _exchanged(self, best: Prediction, least: tuple[int, int]) -> Prediction | None:
        """A smaller cluster that lies beyond one of equal size with another ratio."""
        for towards in (1, -1):
            shape = best.candidate
            while True:
                shape = ClusterShape(shape.prefill + towards, shape.decode - towards)
                if shape.prefill < least[0] or shape.decode < least[1]:
                    break
                exchanged = self._passing(shape)
                if exchanged is None:
                    break
                smaller = self._shrunk(exchanged, least)
                if smaller.candidate.workers < best.candidate.workers:
                    return smaller
        return None


def _less(shape: ClusterShape, step: int, least: tuple[int, int]) -> Iterator[ClusterShape]:
    if shape.prefill - step >= least[0]:
        yield ClusterShape(shape.prefill - step, shape.decode)
    if shape.decode - step >= least[1]:
        yield ClusterShape(shape.prefill, shape.decode - step)
