"""Which command-line option stands for which setting, in both directions.

The services' commands read options into settings with `to_settings`; the local cluster writes settings out
as options with `worker_arguments` and `coordinator_arguments`, so that a child's command line says it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve.config import CoordinatorConfig, WorkerConfig
from splitserve.core_layout import format_cores
from splitserve.route_text import format_route

Options = Mapping[str, str]
"""Option name (with underscores) to the dotted path of its setting."""

ENGINE_OPTIONS: Options = {
    "engine": "engine.kind",
    "dtype": "engine.dtype",
    "quantization": "engine.quantization",
    "device": "engine.device",
    "attention_backend": "engine.attention_backend",
    "cuda_graphs": "engine.cuda_graphs",
    "block_size": "engine.block_size_tokens",
    "num_blocks": "engine.num_blocks",
    "kv_memory_bytes": "engine.kv_memory_bytes",
    "cpu_kernels": "engine.cpu_kernels",
    "dense_rows_bytes": "engine.dense_rows_bytes",
    "max_step_tokens": "engine.max_step_tokens",
    "max_running_requests": "engine.max_running_requests",
    "max_waiting_requests": "engine.max_waiting_requests",
    "max_bypasses": "engine.max_bypasses",
    "prefix_cache": "engine.prefix_cache",
    "context_tokens": "engine.context_tokens",
    "threads": "engine.threads",
    "simulated_prefill_token_s": "engine.simulated_prefill_token_s",
    "simulated_prefill_token2_s": "engine.simulated_prefill_token2_s",
    "simulated_step_s": "engine.simulated_step_s",
    "simulated_context_token_s": "engine.simulated_context_token_s",
    "simulated_sequence_s": "engine.simulated_sequence_s",
}
WORKER_OPTIONS: Options = {
    "worker_id": "worker_id",
    "model": "model",
    "served_model_name": "served_model_name",
    "host": "host",
    "port": "port",
    "advertise_address": "advertise_address",
    "coordinator": "coordinators",
    "transport": "transport",
    "lease": "lease_s",
    "quarantine": "quarantine_s",
    "ticket": "ticket_s",
    "standby": "standby",
    "drain": "drain_s",
    "heartbeat": "heartbeat_s",
    "expected_lane": "expected_lane_gb_per_s",
    "lane_policy": "lane_policy",
    "verify_kv": "verify_kv",
    "wire_dtype": "wire_dtype",
    "metrics_port": "metrics_port",
    "cpus": "cpus",
    "tls": "tls.directory",
    "cluster_token_file": "cluster_token_file",
    "max_output_tokens": "ceilings.max_output_tokens",
    "require_cache_salt": "ceilings.require_cache_salt",
    **ENGINE_OPTIONS,
}
ADMISSION_OPTIONS: Options = {
    "admission": "admission.mode",
    "max_queued_requests": "admission.max_queued_requests",
    "max_queued_prompt_tokens": "admission.max_queued_prompt_tokens",
    "max_queue": "admission.max_queue_s",
    "ttft_slo": "admission.ttft_slo_s",
    "tpot_slo": "admission.tpot_slo_s",
    "prefill_horizon": "admission.prefill_horizon_s",
    "decode_headroom": "admission.decode_headroom",
}
COORDINATOR_OPTIONS: Options = {
    "host": "host",
    "grpc_port": "grpc_port",
    "http_port": "http_port",
    "request_timeout": "request_timeout_s",
    "max_running_requests": "max_running_requests",
    "heartbeat_timeout": "heartbeat_timeout_s",
    "drain": "drain_s",
    "no_worker_wait": "no_worker_wait_s",
    "max_message_bytes": "max_message_bytes",
    "local_prefill": "local_prefill",
    **ADMISSION_OPTIONS,
    "routing": "routing",
    "max_indexed_blocks": "max_indexed_blocks",
    "max_coalesce_ms": "max_coalesce_ms",
    "tokenizer_threads": "tokenizer_threads",
    "metrics_port": "metrics_port",
    "cluster_port": "cluster_port",
    "tls": "tls.directory",
    "cluster_token_file": "cluster_token_file",
    "tenants": "tenants",
    "model_route": "model_routes",
    "direct_model_names": "direct_model_names",
    "circuit_breaker": "circuit_breaker",
}
CLUSTER_OPTIONS: Options = {
    "model": "model",
    "coordinators": "coordinators",
    "served_model_name": "served_model_name",
    "prefill": "prefill",
    "decode": "decode",
    "ready_timeout": "ready_timeout_s",
    "pin_cores": "pin_cores",
    "autoscale": "autoscale",
    "autoscale_interval": "autoscale_interval_s",
    "autoscale_window": "autoscale_window_s",
    "verify_kv": "verify_kv",
    "wire_dtype": "wire_dtype",
    "tls": "tls",
    "cluster_token_file": "cluster_token_file",
    "tenants": "coordinator.tenants",
    "cluster_port": "coordinator.cluster_port",
    "host": "coordinator.host",
    "grpc_port": "coordinator.grpc_port",
    "http_port": "coordinator.http_port",
    "drain": "coordinator.drain_s",
    "engine": "engine.kind",
    "dtype": "engine.dtype",
    "quantization": "engine.quantization",
    "device": "engine.device",
    "block_size": "engine.block_size_tokens",
    "num_blocks": "engine.num_blocks",
    "max_step_tokens": "engine.max_step_tokens",
    "context_tokens": "engine.context_tokens",
    "threads": "engine.threads",
}
AUTOSCALER_OPTIONS: Options = {
    "policy": "policy",
    "coordinator": "coordinators",
    "actuator": "actuator",
    "dry_run": "dry_run",
    "interval": "interval_s",
    "window": "window_s",
    "host": "host",
    "metrics_port": "metrics_port",
    "tls": "tls.directory",
    "cluster_token_file": "cluster_token_file",
    "api_key_file": "api_key_file",
    "project": "docker.project",
    "gpus": "docker.gpus",
    "namespace": "kubernetes.namespace",
}


def to_settings(given: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Option values as nested overrides for `load_settings`. None and empty sequences mean: not given."""
    settings: dict[str, Any] = {}
    for name, path in options.items():
        value = given.get(name)
        if value is None or value in ([], ()):
            continue
        *sections, field = path.split(".")
        section = settings
        for key in sections:
            section = section.setdefault(key, {})
        section[field] = value
    return settings


def worker_arguments(config: WorkerConfig) -> list[str]:
    """The options that give a worker these settings; defaults are left out."""
    return _to_arguments(config.model_dump(exclude_defaults=True), WORKER_OPTIONS)


def coordinator_arguments(config: CoordinatorConfig) -> list[str]:
    """The options that give a coordinator these settings; defaults are left out."""
    return _to_arguments(config.model_dump(exclude_defaults=True), COORDINATOR_OPTIONS)


def _to_arguments(settings: Mapping[str, Any], options: Options) -> list[str]:
    arguments: list[str] = []
    for name, path in options.items():
        value: Any = settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        arguments += _argument(name.replace("_", "-"), value)
    return arguments


def _argument(flag: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case Mapping() if flag == "circuit-breaker":
            return [f"--{flag}", ",".join(f"{setting}={given}" for setting, given in value.items())]
        case Mapping():
            return [argument for route in value.items() for argument in (f"--{flag}", format_route(*route))]
        case tuple() if flag == "cpus":
            return ["--cpus", format_cores(value)] if value else []
        case tuple():
            return [argument for item in value for argument in (f"--{flag}", str(item))]
    return [f"--{flag}", str(value)]
