"""How many replicas: against trying them all, and what cannot be reached."""

from __future__ import annotations

import dataclasses
import math

import pytest

from autoscaler.simulation.engine_model import measured_engine
from autoscaler.simulation.scenario import Scenario, Slo
from autoscaler.simulation.traces.scaling import busiest
from autoscaler.simulation.traces.synthetic import LengthDistribution, steady
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.sizing.roofline import gpu_class
from autoscaler.sizing.sizing import (
    ClusterShape,
    Prediction,
    SizingTerms,
    cheapest,
    designs_of,
    idle_share,
    predicted,
    ranked,
    size,
)
from dev.docs.flags import splitserve_flags
from splitserve.errors import FailedPreconditionError, InvalidArgumentError
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.v1 import registry_pb2, scaling_pb2
from tests.support.scaling.engine_models import LLAMA_70B, engine_model

ENGINE = engine_model(prefill_token_s=1e-4, step_s=5e-3, sequence_s=1e-3, max_running_requests=32)
"""10,000 prompt tokens a second; a batch of 45 keeps to 50 ms."""
pytestmark = pytest.mark.timeout(60)


def scenario(rate: float, prompt: str, output: str, seconds: float = 60, slo: Slo | None = None) -> Scenario:
    prompts, outputs = LengthDistribution.parse("p", prompt), LengthDistribution.parse("o", output)
    return Scenario(steady(rate, seconds, prompts, outputs, 1), ENGINE, slo or Slo(0.6, 0.05))


@pytest.mark.parametrize(
    ("rate", "prompt", "output"),
    [(6, "p50=2000,p95=4000", "10"), (6, "100", "p50=400,p95=700"), (10, "1000", "200"), (0.2, "300", "20")],
)
def test_it_is_the_least_of_all_splits(rate: float, prompt: str, output: str) -> None:
    case, terms = scenario(rate, prompt, output), SizingTerms(0.95)
    found = size(case, terms)
    assert found.split is not None
    workers = found.split.candidate.workers
    smaller = [
        predicted(shape, case).attainment
        for total in range(2, workers)
        for shape in (ClusterShape(p, total - p) for p in range(1, total))
    ]
    assert max(smaller, default=0.0) < terms.goal <= found.split.attainment
    if found.colocated is not None and (fewer := found.colocated.candidate.both - 1):
        shape = ClusterShape(0, 0, fewer)
        assert predicted(shape, case).attainment < terms.goal
    assert found.best.candidate.workers <= workers
    assert size(case, terms) == found, "the same input, another answer"


def test_steady_traffic_is_not_served_from_a_queue_that_only_grows() -> None:
    # 15,000 prompt tokens a second on 10,000: within two seconds only, one replica would look well.
    case = scenario(15, "1000", "2", seconds=2, slo=Slo(5.0, 0.05))
    once, forever = size(case, SizingTerms()), size(case, SizingTerms(steady=True))
    assert once.split is not None
    assert forever.split is not None
    assert once.split.candidate.prefill == 1
    assert forever.split.candidate.prefill > 1


def test_what_no_number_of_replicas_reaches() -> None:
    slow = scenario(1, "1000", "10", slo=Slo(0.05, 0.05))
    assert idle_share(slow) == 0
    with pytest.raises(FailedPreconditionError, match=r"even an idle replica keeps only 0\.0%") as caught:
        size(slow, SizingTerms())
    assert caught.value.reason == "TOO_SLOW"
    with pytest.raises(FailedPreconditionError, match="no number of replicas up to 2 ") as caught:
        size(scenario(40, "1000", "200"), SizingTerms(max_replicas=2))
    assert caught.value.reason == "GOAL_NOT_REACHED"
    with pytest.raises(FailedPreconditionError, match="within --limit"):
        size(scenario(40, "1000", "200"), SizingTerms(limit_s=0.0))
    for wrong in ({"goal": 0.0}, {"goal": math.nan}, {"max_replicas": 1}, {"max_replicas": 5000}):
        with pytest.raises(InvalidArgumentError):
            SizingTerms(**wrong)  # type: ignore[arg-type]


def test_a_replica_has_the_gpus_with_which_fewest_are_needed() -> None:
    designs = designs_of(LLAMA_70B, gpu_class("H100"), 25.0, 1200)
    # Two GPUs hold the weights, and KV of two requests.
    assert designs[0].gpus == 2
    assert designs[0].engine.kv_capacity_tokens < 2400 * 2
    case = dataclasses.replace(scenario(3, "1000", "200"), slo=Slo(2.0, 0.2))
    found = cheapest(designs, case, SizingTerms(steady=True))
    assert found[0].design.gpus == 4
    assert found[0].gpus < 10
    assert [one.gpus for one in found] == sorted(one.gpus for one in found)


def test_the_busiest_stretch() -> None:
    arrivals = [0, 10, 20, 21, 22, 23, 40, 60]
    trace = Trace("t", [TraceRequest(float(at), 100, 10) for at in arrivals])
    cut = busiest(trace, 4, ENGINE, 0.05)
    assert [one.arrival_s for one in cut.requests] == [0, 1, 2, 3]
    assert busiest(trace, 8, ENGINE, 0.05) is trace


def prediction(prefill: int, attainment: float, strain: float = 0.5) -> Prediction:
    return Prediction(ClusterShape(prefill, 1), attainment, 1.0, 1.0, 0.1, 0.01, 0, strain)


def test_the_order_of_candidates() -> None:
    few, many = prediction(1, 0.96), prediction(3, 1.0)
    weak, weaker = prediction(2, 0.9), prediction(1, 0.5)
    assert ranked([weaker, many, weak, few], 0.95) == [few, many, weak, weaker]
    quick, slow = prediction(2, 1.0, 0.2), prediction(2, 1.0, 0.4)
    assert ranked([slow, quick], 0.95) == [quick, slow]


@pytest.mark.parametrize("shape", [ClusterShape(1, 3), ClusterShape(0, 0, 3)], ids=["split", "colocated"])
def test_the_commands_have_options_that_there_are(shape: ClusterShape) -> None:
    words = shape.apply.split()
    assert words[:2] == ["splitserve", "up"]
    assert {word for word in words if word.startswith("--")} <= splitserve_flags("up")


def worker(latency: LatencyModel, **facts: int) -> scaling_pb2.WorkerSignals:
    load = registry_pb2.WorkerLoad(latency=latency.to_proto())
    return scaling_pb2.WorkerSignals(load=load, **facts)  # type: ignore[arg-type]


def test_a_running_cluster_measures_its_engine() -> None:
    prefill = worker(LatencyModel(prefill=PrefillLatency(0.01, 1e-3, 2e-6)), kv_capacity_tokens=5000)
    prefill.lane_gb_per_second = 3.0
    slow = worker(LatencyModel(decode=DecodeLatency(0.02, 1e-3, 1e-6)), kv_capacity_tokens=4000)
    fast = worker(LatencyModel(decode=DecodeLatency(0.01, 1e-3, 1e-6)), max_running_requests=7)
    engine = measured_engine([prefill, slow, fast])
    assert engine.prompt_s(1000) == pytest.approx(0.01 + 1.0 + 2e-6 * 1000 * 500)
    assert engine.decode.decode_step_s(2, 100) == pytest.approx(0.015 + 2e-3 + 1e-4)
    assert (engine.kv_capacity_tokens, engine.max_running_requests) == (4000, 7)
    assert engine.link_gb_per_s == 3.0
    for workers, what in (([], "prompts"), ([prefill], "decode steps")):
        with pytest.raises(FailedPreconditionError, match=f"no worker has measured how long {what} take"):
            measured_engine(workers)
