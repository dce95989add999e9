"""The processes of a local cluster, its readiness, and restarts."""

from __future__ import annotations

import sys

from splitserve.cluster.child_process import RestartPolicy
from splitserve.cluster.process_specs import cluster_specs, ready_model
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.v1 import inference_pb2


def test_a_cluster_gives_each_worker_its_cores_and_engine() -> None:
    config = ClusterConfig(
        model="simulated",
        prefill=2,
        decode=1,
        engine=EngineConfig(kind="simulated", simulated_step_s=0.5),
        coordinator=CoordinatorConfig(grpc_port=4000, drain_s=7, host="0.0.0.0"),
    )
    specs = cluster_specs(config, [0, 1, 2])
    assert [spec.name for spec in specs] == ["coordinator", "prefill-0", "prefill-1", "decode-0"]
    assert specs[0].command[:4] == (sys.executable, "-m", "splitserve", "coordinator")
    command = " ".join(specs[3].command)
    for part in (
        "decode-worker --worker-id decode-0",
        "--coordinator 127.0.0.1:4000",
        "--cpus 2",
        "--threads 1",
    ):
        assert part in command
    assert "--simulated-step-s 0.5" in command
    assert "--drain 7.0" in command
    assert specs[3].layout == "cores 2, 1 thread"


def test_ready_means_all_workers_and_a_ready_model() -> None:
    config = ClusterConfig(prefill=1, decode=2)
    model = inference_pb2.ModelInfo(name="m", ready=True)

    def info(*workers: tuple[str, str]) -> inference_pb2.GetServerInfoResponse:
        listed = [inference_pb2.WorkerInfo(pool=pool, state=state, model="m") for pool, state in workers]
        return inference_pb2.GetServerInfoResponse(workers=listed)

    whole = info(("prefill", "ready"), ("decode", "ready"), ("decode", "ready"))
    assert ready_model([model], whole, config) == "m"
    assert ready_model([], whole, config) is None
    assert ready_model([inference_pb2.ModelInfo(name="m")], whole, config) is None
    assert ready_model([model], info(("prefill", "ready"), ("decode", "ready")), config) is None
    connecting = info(("prefill", "ready"), ("decode", "ready"), ("decode", "connecting"))
    assert ready_model([model], connecting, config) is None


def test_restarts_back_off_and_give_up() -> None:
    policy = RestartPolicy(max_deaths=4, window_s=60, first_delay_s=1, last_delay_s=3)
    assert policy.delay_s([10.0], 10.0) == 1
    assert policy.delay_s([10.0, 20.0], 20.0) == 2
    assert policy.delay_s([10.0, 20.0, 30.0], 30.0) == 3
    assert policy.delay_s([10.0, 20.0, 30.0, 40.0], 40.0) is None
    assert policy.delay_s([10.0, 20.0, 30.0, 80.5], 80.5) == 2
