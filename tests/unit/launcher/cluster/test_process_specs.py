"""The processes of a local cluster, with and without an autoscaler, its readiness, and restarts."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.actuators.actuator import ReplicaShape
from bench.cluster import cluster_specs
from launcher.cluster.child_process import RestartPolicy
from launcher.cluster.local_scaling import LocalScaling
from launcher.cluster.process_specs import check_workers, each_coordinator, ready_model
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import VLLM_START_S, EngineConfig
from splitserve.errors import ConfigError, ResourceExhaustedError
from splitserve.gpus.inventory import GpuInventory
from splitserve.runtime.children_end import CHILD_S, KILLED_S
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
    assert specs[0].command[:4] == (sys.executable, "-m", "launcher", "coordinator")
    command = " ".join(specs[3].command)
    for part in (
        "worker --worker-id decode-0",
        "--role decode",
        "--coordinator 127.0.0.1:4000",
        "--cpus 2",
        "--threads 1",
    ):
        assert part in command
    assert "--simulated-step-s 0.5" in command
    assert "--drain 7.0" in command
    assert specs[3].layout == "cores 2, 1 thread"


def test_a_start_of_vllm_has_time_to_end_its_processes() -> None:
    def least_s(kind: str) -> list[float]:
        engine = EngineConfig.model_validate({"kind": kind})
        coordinator = CoordinatorConfig(grpc_port=4000)
        config = ClusterConfig(model="simulated", engine=engine, coordinator=coordinator)
        return [spec.least_stop_s for spec in cluster_specs(config, [0, 1])]

    assert least_s("vllm") == [0.0, *2 * [VLLM_START_S + CHILD_S + KILLED_S]]
    assert least_s("torch") == least_s("simulated") == [0.0] * 3


def test_the_coordinator_is_told_which_tokenizer_comes(tmp_path: Path) -> None:
    def named(model: str, kind: str) -> str | None:
        engine = EngineConfig.model_validate({"kind": kind})
        coordinator = CoordinatorConfig(grpc_port=4000)
        specs = cluster_specs(ClusterConfig(model=model, engine=engine, coordinator=coordinator), [0, 1])
        return dict(pairwise(specs[0].command)).get("--tokenizer")

    (tmp_path / "config.json").write_text("{}")
    assert named(str(tmp_path), "torch") == str(tmp_path)
    assert named(str(tmp_path), "simulated") is None
    assert named("some-org/not-here", "torch") is None
    assert named(str(tmp_path / "nothing"), "torch") is None


def test_workers_of_role_both_share_out_cores_and_gpus() -> None:
    config = ClusterConfig(model="simulated", workers=3, coordinator=CoordinatorConfig(grpc_port=4000))
    gpus = GpuInventory.of_groups([[str(number) for number in range(3)]])
    specs = cluster_specs(config, [0, 1, 2], gpus=gpus)
    assert [(spec.name, spec.role) for spec in specs[1:]] == [(f"worker-{n}", "worker") for n in range(3)]
    assert [spec.command[3] for spec in specs[1:]] == ["worker"] * 3
    assert [dict(pairwise(spec.command)).get("--role", "both") for spec in specs[1:]] == ["both"] * 3
    assert [dict(pairwise(spec.command))["--cpus"] for spec in specs[1:]] == ["0", "1", "2"]
    assert [dict(pairwise(spec.command))["--gpus"] for spec in specs[1:]] == ["0", "1", "2"]
    with pytest.raises(ResourceExhaustedError, match="4 workers take 4"):
        cluster_specs(config.model_copy(update={"workers": 4}), [0, 1, 2], gpus=gpus)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 1}, "3 workers of role both and prefill at once"),
        ({"prefill": 2, "decode": 2}, "3 workers of role both and prefill and decode at once"),
    ],
)
def test_workers_of_role_both_beside_others_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_workers(ClusterConfig(workers=3, **given))
    assert refused.value.field == "workers"
    check_workers(ClusterConfig(workers=3, engine=EngineConfig(kind="vllm")))
    check_workers(ClusterConfig(**given))


def test_workers_are_ready_whatever_their_roles() -> None:
    model = inference_pb2.ModelInfo(name="m", ready=True)
    config = ClusterConfig(workers=3)
    for pools in (("prefill", "decode", "decode"), ("decode", "decode", "decode")):
        listed = [inference_pb2.WorkerInfo(role=pool, state="ready", model="m") for pool in pools]
        info = inference_pb2.GetServerInfoResponse(workers=listed)
        assert ready_model([model], info, config) == "m"
        assert ready_model([model], inference_pb2.GetServerInfoResponse(workers=listed[1:]), config) is None


def test_ready_means_all_workers_and_a_ready_model() -> None:
    config = ClusterConfig(prefill=1, decode=2)
    model = inference_pb2.ModelInfo(name="m", ready=True)

    def info(*workers: tuple[str, str]) -> inference_pb2.GetServerInfoResponse:
        listed = [inference_pb2.WorkerInfo(role=pool, state=state, model="m") for pool, state in workers]
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


COORDINATOR = CoordinatorConfig(grpc_port=4000, http_port=8000)


def test_ports_follow_each_other_and_workers_know_all() -> None:
    config = ClusterConfig(model="simulated", coordinators=3, coordinator=COORDINATOR)
    seen = [(c.coordinator.grpc_port, c.coordinator.http_port) for c in each_coordinator(config)]
    assert seen == [(4000, 8000), (4001, 8001), (4002, 8002)]
    specs = {spec.name: spec.command for spec in cluster_specs(config, [0, 1])}
    assert [name for name in specs if name.startswith("coordinator")] == [
        "coordinator",
        "coordinator-1",
        "coordinator-2",
    ]
    for worker in ("prefill-0", "decode-0"):
        assert [a for a in specs[worker] if a.startswith("127.0.0.1:400")] == [
            "127.0.0.1:4000",
            "127.0.0.1:4001",
            "127.0.0.1:4002",
        ]


def test_with_tls_every_coordinator_has_two_grpc_ports() -> None:
    coordinator = COORDINATOR.model_copy(update={"cluster_port": 4001, "http_port": None})
    config = ClusterConfig(model="simulated", coordinators=2, coordinator=coordinator, tls=Path("certs"))
    second = each_coordinator(config)[1].coordinator
    assert (second.grpc_port, second.cluster_port, second.http_port) == (4002, 4003, None)


def scaling(
    folder: Path, given: dict[str, int] | None = None, pool: dict[str, Any] | None = None, **limits: Any
) -> LocalScaling:
    both = {"target_ms": 100, **(pool or {})}
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"prefill": both, "decode": both, **limits}))
    return LocalScaling.of(ClusterConfig.model_validate(given or {}), path)


def test_it_starts_with_the_least_that_serves(tmp_path: Path) -> None:
    made = scaling(tmp_path, pool={"min_replicas": 3, "gpus_per_replica": 2, "gpu": "L40S"})
    assert (made.config.prefill, made.config.decode, made.config.prefill_gpus) == (3, 3, 2)
    assert made.seats == {
        f"{pool}-{n}": ReplicaShape(2, "L40S") for pool in ("prefill", "decode") for n in range(3)
    }
    assert scaling(tmp_path, pool={"min_replicas": 0}).config.prefill == 1
    assert scaling(tmp_path, {"prefill": 4}).config.prefill == 4


def test_workers_of_role_both_are_not_scaled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers: an autoscaler scales pools"):
        scaling(tmp_path, {"workers": 2})


def test_given_numbers_are_within_the_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill: .* 4 GPUs, more than gpu_budget \(2\)") as caught:
        scaling(tmp_path, {"prefill": 3}, gpu_budget=2)
    assert caught.value.field == "prefill"
    made = scaling(tmp_path, {"prefill": 3}, gpu_budget=4)
    assert (made.config.prefill, made.config.decode) == (3, 1)
