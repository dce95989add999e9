"""The fewest replicas that keep a traffic's targets: in two pools, and colocated; and how many GPUs a replica has.

Each trial replays the trace on fixed replicas behind the production router. The search begins where the work of the
trace just fits, adds replicas until the goal is reached, and removes replicas while it stays reached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, static_replicas
from autoscaler.simulation.traces.scaling import pool_work_s
from autoscaler.sizing.model_shape import ModelShape
from autoscaler.sizing.roofline import GPU_COUNTS, GpuClass, ReplicaDesign, replica_design
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.roles import PoolName

MAX_REPLICAS = 1024
STEADY_BUSY = 0.95
"""Largest share of its time that a pool may be busy under steady random traffic. The queues of a busier pool grow for
longer than a replayed trace lasts."""
_PLATEAU = 0.002
"""Smallest gain of attainment that counts. If more replicas of a pool gain less, another pool is the bottleneck."""
_PATIENCE = 2
"""The search for colocated replicas ends when this factor more replicas gain nothing."""
_NEAR = 0.5
"""From this attainment on, replicas are added in small steps."""
_SOME = 0.1
"""Below this attainment a cluster is so overloaded that a few more replicas may gain nothing yet."""
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


@dataclass(frozen=True, slots=True)
class SizingTerms:
    """Goal and limits of a sizing."""

    goal: float = 0.95
    """Share of requests within both targets."""
    max_replicas: int = 256
    """Most replicas of both pools together."""
    steady: bool = False
    """Whether the traffic goes on like this after the trace. No pool may then have work for more than `STEADY_BUSY` of
    its time, even if the trace is too short to show it."""
    limit_s: float = 120.0
    """Approximate time for all replays, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.goal <= 1:
            message = f"goal must be above 0 and at most 1, not {self.goal:g}"
            raise InvalidArgumentError(message, field="goal")
        if not 2 <= self.max_replicas <= MAX_REPLICAS:
            message = f"max_replicas must be 2..{MAX_REPLICAS}, not {self.max_replicas}"
            raise InvalidArgumentError(message, field="max_replicas")


@dataclass(frozen=True, slots=True)
class Sizing:
    """The best cluster of each kind; None: none within the bounds reached the goal."""

    split: Prediction | None
    colocated: Prediction | None
    replays: Sequence[Prediction]
    out_of_time: bool
    goal: float

    @property
    def best(self) -> Prediction:
        """The cluster with fewer replicas; of equal ones the one that attains more, then the quicker one."""
        reached = [prediction for prediction in (self.split, self.colocated) if prediction is not None]
        return ranked(reached, self.goal)[0]

    def closest(self, kind: str) -> Prediction | None:
        """The replayed cluster of a kind that attains most."""
        of_kind = [prediction for prediction in self.replays if prediction.candidate.kind == kind]
        return max(of_kind, key=lambda prediction: prediction.attainment, default=None)


def idle_share(scenario: Scenario) -> float:
    """Share of requests that an idle replica serves within both targets: the most that any number of replicas
    attains."""
    engine, slo, met = scenario.engine, scenario.slo, 0
    for request in scenario.trace.requests:
        context = request.prompt_tokens + request.output_tokens / 2
        ttft_met = engine.request_s + engine.prompt_s(request.prompt_tokens) <= slo.ttft_s
        tpot_met = request.output_tokens < 2 or engine.decode.decode_step_s(1, context) <= slo.tpot_s
        met += ttft_met and tpot_met
    return met / max(1, len(scenario.trace.requests))


def least_replicas(scenario: Scenario) -> int:
    """Colocated replicas whose time the work of the trace just fills: steady traffic needs at least as many."""
    trace = scenario.trace
    work = sum(pool_work_s(trace.requests, scenario.engine, scenario.slo.tpot_s))
    return max(1, math.ceil(work / max(trace.duration_s, 1e-3)))


def size(
    scenario: Scenario, terms: SizingTerms, on_replayed: Callable[[ClusterShape], None] | None = None
) -> Sizing:
    """Searches the best cluster of both kinds. Calls `on_replayed` after each replay.

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
        nearest = max(search.done.values(), key=lambda prediction: prediction.attainment, default=None)
        result = (
            f"{nearest.candidate.name} keeps {nearest.attainment:.1%}"
            if nearest
            else "its work alone is more"
        )
        bound = "tried within --limit" if search.out_of_time else f"up to {terms.max_replicas}"
        message = f"no number of replicas {bound} keeps {terms.goal:.1%} of the requests within the targets; {result}"
        raise FailedPreconditionError(message, reason="GOAL_NOT_REACHED", field="goal")
    return Sizing(split, colocated, list(search.done.values()), search.out_of_time, terms.goal)


def _attainment(prediction: Prediction) -> tuple[float, float]:
    """Sort key: of equal attainments the one with lower latencies is larger."""
    return prediction.attainment, -prediction.strain


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
        best = self._grown(ClusterShape(prefill, decode))
        if best is None:
            return None
        least = (prefill, decode) if self.terms.steady else (1, 1)
        best = self._shrunk(best, least)
        while (better := self._exchanged(best, least)) is not None:
            best = better
        return best

    def colocated(self) -> Prediction | None:
        """The fewest replicas that compute prompts and decode."""
        floor = max(1, math.ceil(sum(self._work()) - 1e-9))
        below, count = (floor if self.terms.steady else 1) - 1, floor
        highest, highest_count = -1.0, count
        # 1. Add replicas until the goal is reached.
        while (best := self._tried(ClusterShape(0, 0, count))) is not None:
            if best.attainment >= self.terms.goal:
                break
            if best.attainment >= highest + _PLATEAU:
                highest, highest_count = best.attainment, count
            elif count >= _PATIENCE * highest_count and highest > _SOME:
                return None  # more replicas do not help
            below, count = count, max(count + 1, math.ceil(count * 1.25))
        # 2. Bisect between the last count that missed the goal and the one that reached it.
        while best is not None and count - below > 1:
            middle = count - 1 if below < floor else (below + count) // 2
            trial = self._tried(ClusterShape(0, 0, middle))
            if trial is None:
                break
            if trial.attainment >= self.terms.goal:
                best, count = trial, middle
            else:
                below = middle
        return best

    def _tried(self, shape: ClusterShape) -> Prediction | None:
        """The replay of a shape, each only once; None beyond the bounds."""
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
        """Replicas of each pool, not rounded, whose permitted busy time the work of the trace just fills."""
        trace = self.scenario.trace
        work = pool_work_s(trace.requests, self.scenario.engine, self.scenario.slo.tpot_s)
        length_s = max(trace.duration_s, 1e-3) * (STEADY_BUSY if self.terms.steady else 1.0)
        return work[0] / length_s, work[1] / length_s

    def _grown(self, shape: ClusterShape) -> Prediction | None:
        now = self._tried(shape)
        while now is not None and now.attainment < self.terms.goal:
            prefill, decode = now.candidate.prefill, now.candidate.decode
            # Far from the goal in larger steps; `_shrunk` removes what was too much.
            part = 8 if now.attainment >= _NEAR else 3
            more_prefill, more_decode = prefill + max(1, prefill // part), decode + max(1, decode // part)
            one_larger = (ClusterShape(more_prefill, decode), ClusterShape(prefill, more_decode))
            trials = [trial for shape in one_larger if (trial := self._tried(shape)) is not None]
            best = max(trials, key=_attainment, default=None)
            if best is None or best.attainment < now.attainment + _PLATEAU:
                best = self._tried(ClusterShape(more_prefill, more_decode))
            now = best
        return now

    def _shrunk(self, best: Prediction, least: tuple[int, int]) -> Prediction:
        step = max(1, max(best.candidate.prefill, best.candidate.decode) // 4)
        while step:
            smaller = _smaller(best.candidate, step, least)
            passing = [trial for shape in smaller if (trial := self._passing(shape)) is not None]
            if passing:
                best = max(passing, key=_attainment)
            else:
                step //= 2
        return best

    def _exchanged(self, best: Prediction, least: tuple[int, int]) -> Prediction | None:
        """A smaller cluster, found by way of one of equal size with another ratio; None: there is none."""
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


def _smaller(shape: ClusterShape, step: int, least: tuple[int, int]) -> Iterator[ClusterShape]:
    if shape.prefill - step >= least[0]:
        yield ClusterShape(shape.prefill - step, shape.decode)
    if shape.decode - step >= least[1]:
        yield ClusterShape(shape.prefill, shape.decode - step)


@dataclass(frozen=True, slots=True)
class SizedReplica:
    """A replica, and how many of them the traffic needs."""

    design: ReplicaDesign
    sizing: Sizing

    @property
    def gpus(self) -> int:
        """GPUs of the best cluster."""
        return self.design.gpus * self.sizing.best.candidate.workers


def designs_of(model: ModelShape, gpu: GpuClass, lane_gb_per_s: float, longest: int) -> list[ReplicaDesign]:
    """The replicas of 1, 2, 4 and 8 GPUs that hold the model and a request of `longest` tokens, the smallest first.

    Raises FailedPreconditionError (MODEL_DOES_NOT_FIT) if there is none.
    """
    designs: list[ReplicaDesign] = []
    refused = None
    for gpus in GPU_COUNTS:
        try:
            candidate = replica_design(model, gpu, gpus, lane_gb_per_s)
        except FailedPreconditionError as error:
            refused = error
        except InvalidArgumentError:
            continue  # its heads do not divide among this many GPUs
        else:
            designs += [candidate] if candidate.engine.kv_capacity_tokens >= longest else []
    if designs:
        return designs
    if refused is not None and refused.reason == "MODEL_DOES_NOT_FIT":
        raise refused
    message = (
        f"gpu: no replica of up to {GPU_COUNTS[-1]} x {gpu.name} has KV for a request of {longest} tokens"
    )
    raise FailedPreconditionError(message, reason="MODEL_DOES_NOT_FIT", field="gpu")


def cheapest(
    designs: Sequence[ReplicaDesign],
    scenario: Scenario,
    terms: SizingTerms,
    on_replayed: Callable[[ClusterShape], None] | None = None,
) -> list[SizedReplica]:
    """The designs that reach the goal, the one with the fewest GPUs first. A design that needs at least as many GPUs as
    an earlier result is not tried.

    Raises what `size` raises if no design reaches the goal, for the design with the most GPUs.
    """
    began_s, sized = time.monotonic(), list[SizedReplica]()
    refused: FailedPreconditionError | None = None
    trials = []
    for design in designs:
        of_design = replace(scenario, engine=design.engine)
        trials.append((design.gpus * least_replicas(of_design), design, of_design))
    for least_gpus, design, of_design in sorted(trials, key=lambda trial: trial[0]):
        if sized and least_gpus >= min(replica.gpus for replica in sized):
            continue
        left_s = max(1.0, terms.limit_s - (time.monotonic() - began_s))
        try:
            sizing = size(of_design, replace(terms, limit_s=left_s), on_replayed)
            sized.append(SizedReplica(design, sizing))
        except FailedPreconditionError as error:
            refused = error if refused is None or design is designs[-1] else refused
    if refused is not None and not sized:
        raise refused
    return sorted(sized, key=lambda replica: replica.gpus)
