"""Options and settings say the same, in both directions."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from splitserve.admission_settings import AdmissionConfig
from splitserve.cli import services, up
from splitserve.cluster_setup import cluster_specs, ready_model
from splitserve.config import ClusterConfig, CoordinatorConfig, EngineConfig, WorkerConfig, load_settings
from splitserve.restart_policy import RestartPolicy
from splitserve.security_settings import CeilingConfig, TlsConfig
from splitserve.service_arguments import (
    AUTOSCALER_OPTIONS,
    CLUSTER_OPTIONS,
    COORDINATOR_OPTIONS,
    WORKER_OPTIONS,
    coordinator_arguments,
    to_settings,
    worker_arguments,
)
from splitserve.traffic_settings import CircuitBreakerConfig
from splitserve.v1 import inference_pb2

ENGINE = EngineConfig(
    kind="simulated",
    dtype="float32",
    quantization="int8",
    device="cuda:1",
    attention_backend="torch",
    cuda_graphs="off",
    block_size_tokens=8,
    num_blocks=64,
    kv_memory_bytes=2**20,
    cpu_kernels="off",
    dense_rows_bytes=2**16,
    max_step_tokens=100,
    max_running_requests=5,
    max_waiting_requests=6,
    max_bypasses=7,
    prefix_cache=False,
    context_tokens=99,
    threads=3,
    simulated_prefill_token_s=1e-5,
    simulated_prefill_token2_s=1e-9,
    simulated_step_s=0.5,
    simulated_context_token_s=0.25,
    simulated_sequence_s=0.125,
)
WORKER = WorkerConfig(
    worker_id="w",
    model="m",
    served_model_name="s",
    host="0.0.0.0",
    port=9,
    advertise_address="h:1",
    coordinators=("a:1", "b:2"),
    transport="memory",
    lease_s=1.5,
    quarantine_s=2.5,
    ticket_s=3.5,
    standby=True,
    drain_s=4.5,
    heartbeat_s=0.25,
    expected_lane_gb_per_s=1.25,
    lane_policy="refuse",
    verify_kv="sampled",
    wire_dtype="fp8_e4m3",
    metrics_port=9100,
    cpus=(0, 1, 2, 5),
    tls=TlsConfig(directory=Path("certs")),
    cluster_token_file=Path("token"),
    ceilings=CeilingConfig(max_output_tokens=77, require_cache_salt=True),
    engine=ENGINE,
)


FILE_ONLY = {"faults"}
"""Settings that stand in a file and have no option."""


def changed_everywhere(settings: WorkerConfig | CoordinatorConfig) -> bool:
    named = settings.model_dump().keys() - FILE_ONLY
    return named == settings.model_dump(exclude_defaults=True).keys()


def test_every_worker_setting_passes_through_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitserve.cli.main import app

    assert changed_everywhere(WORKER)
    assert ENGINE.model_dump().keys() == ENGINE.model_dump(exclude_defaults=True).keys()
    started: list[tuple[str, WorkerConfig]] = []
    monkeypatch.setattr(services, "_run_worker", lambda pool, settings: started.append((pool, settings)))
    app(args=["decode-worker", *worker_arguments(WORKER)], standalone_mode=False)
    app(args=["prefill-worker", *worker_arguments(WORKER)], standalone_mode=False)
    assert started == [("decode", WORKER), ("prefill", WORKER)]


def test_every_coordinator_setting_has_its_option() -> None:
    settings = CoordinatorConfig(
        host="::1",
        grpc_port=1,
        http_port=8,
        admission=AdmissionConfig(
            mode="off",
            max_queued_requests=11,
            max_queued_prompt_tokens=12,
            max_queue_s=13,
            ttft_slo_s=1.5,
            tpot_slo_s=0.5,
            prefill_horizon_s=0.75,
            decode_headroom=0.25,
        ),
        request_timeout_s=2,
        max_running_requests=3,
        heartbeat_timeout_s=4,
        drain_s=5,
        no_worker_wait_s=6,
        max_message_bytes=2**17,
        routing="least-wait",
        max_indexed_blocks=5000,
        tokenizer_threads=7,
        max_coalesce_ms=7.5,
        local_prefill="auto",
        metrics_port=9101,
        cluster_port=9102,
        tls=TlsConfig(directory=Path("certs")),
        cluster_token_file=Path("token"),
        tenants=Path("tenants.yaml"),
        model_routes={"words": {"words-v1": 95, "words-v2": 5}},
        direct_model_names="hide",
        circuit_breaker=CircuitBreakerConfig(
            enabled=False,
            consecutive_failures=1,
            failure_rate=0.25,
            min_requests=3,
            window_s=4,
            open_s=5,
            max_open_s=6,
        ),
    )
    assert changed_everywhere(settings)
    arguments = coordinator_arguments(settings)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    options = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    assert load_settings(CoordinatorConfig, None, **to_settings(options, COORDINATOR_OPTIONS)) == settings


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (services.coordinator, COORDINATOR_OPTIONS),
        (services._worker_command, WORKER_OPTIONS),
        (services.autoscaler, AUTOSCALER_OPTIONS),
        (up.up, CLUSTER_OPTIONS),
    ],
)
def test_commands_take_the_options_of_their_table(command: object, options: dict[str, str]) -> None:
    assert callable(command)
    assert set(options) - set(inspect.signature(command).parameters) == set()


def test_an_option_wins_over_the_file_and_absence_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from splitserve.cli.main import app

    path = tmp_path / "worker.yaml"
    file = {"worker_id": "named", "model": "m", "coordinators": ["a:1"], "engine": {"simulated_step_s": 0.5}}
    path.write_text(json.dumps(file))
    started: list[WorkerConfig] = []
    monkeypatch.setattr(services, "_run_worker", lambda _pool, settings: started.append(settings))
    app(args=["decode-worker", "--config", str(path), "--model", "other"], standalone_mode=False)
    assert started[0].worker_id == "named"
    assert started[0].model == "other"
    assert started[0].coordinators == ("a:1",)
    assert started[0].engine.simulated_step_s == 0.5


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
