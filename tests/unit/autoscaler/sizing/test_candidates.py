"""The order of candidates, their commands, and what a running cluster has measured."""

from __future__ import annotations

import pytest

from autoscaler.simulation.engine_model import measured_engine
from autoscaler.sizing.sizing import ClusterShape, Prediction, ranked
from dev.docs.flags import splitserve_flags
from splitserve.errors import FailedPreconditionError
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency
from splitserve.v1 import registry_pb2, scaling_pb2


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
