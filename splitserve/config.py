"""Validated, frozen settings of every part. Read once at start; nothing changes them afterwards.

Each setting can stand in a YAML file (`--config FILE`) under its section (`cluster`, `coordinator`,
`worker`, `engine`), and most have a command-line option that wins over the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitserve.errors import ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Settings):
    """How a worker computes."""

    kind: Literal["torch", "simulated"] = "torch"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 (the simulated engine ignores it)."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto`: cuda when there is one, else cpu."""
    block_size_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    num_blocks: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """KV blocks in the pool. Default: what `kv_memory_bytes` holds."""
    kv_memory_bytes: Annotated[int, Field(ge=2**16)] | None = None
    """Memory of the KV pool. Default: 1 GiB on cpu, 80% of what is free after loading on cuda."""
    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Token budget of one step; longer prompts are computed in chunks."""
    max_running_requests: Annotated[int, Field(ge=1, le=65536)] = 64
    max_waiting_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    max_bypasses: Annotated[int, Field(ge=0, le=10**6)] = 16
    """How many later requests may overtake one that does not fit before it blocks the queue."""
    prefix_cache: bool = True
    context_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Prompt plus output tokens at most. Default and upper bound: the model's own."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads. Default: the number of cores the worker may run on."""
    simulated_prefill_token_s: Annotated[float, Field(ge=0)] = 20e-6
    simulated_prefill_token2_s: Annotated[float, Field(ge=0)] = 0.0
    simulated_step_s: Annotated[float, Field(ge=0)] = 2e-3
    simulated_context_token_s: Annotated[float, Field(ge=0)] = 0.0
    simulated_sequence_s: Annotated[float, Field(ge=0)] = 50e-6


class WorkerConfig(_Settings):
    """One prefill or decode worker."""

    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    model: str
    """Embedded model's name, local folder, GGUF file or Hugging Face id; "simulated" needs no files."""
    served_model_name: str | None = None
    """Name that clients use. Default: the model's own short name."""
    host: str = "127.0.0.1"
    port: Port = 0
    """0 takes a free port."""
    advertise_address: str | None = None
    """"host:port" told to coordinators. Default: host and the bound port."""
    coordinators: tuple[str, ...] = ()
    transport: Literal["nixl", "memory"] = "nixl"
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long reserved blocks outlive the last sign of life of their coordinator."""
    quarantine_s: Annotated[float, Field(gt=0, le=7200)] = 45.0
    """How long aborted blocks wait for their writer before it is fenced; longer than the lease."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    cpus: tuple[int, ...] = ()
    """Cores to run on. Default: all that the process may use."""
    engine: EngineConfig = EngineConfig()


class CoordinatorConfig(_Settings):
    """The front door."""

    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    request_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Upper limit and default of a generation's time."""
    max_running_requests: Annotated[int, Field(ge=1, le=10**6)] = 4096
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    no_worker_wait_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    """How long a request waits for a missing pool before UNAVAILABLE."""
    max_message_bytes: Annotated[int, Field(ge=2**16, le=2**30)] = 16 * 2**20
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2


class ClusterConfig(_Settings):
    """A local cluster, as `splitserve up` starts it."""

    model: str = "smollm2-135m-instruct"
    served_model_name: str | None = None
    prefill: Annotated[int, Field(ge=1, le=64)] = 1
    decode: Annotated[int, Field(ge=1, le=64)] = 1
    transport: Literal["nixl"] = "nixl"
    pin_cores: bool = True
    """Give each worker its own cores where cores are few."""
    ready_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    engine: EngineConfig = EngineConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()


S = TypeVar("S", bound=_Settings)


def load_settings(kind: type[S], path: Path | None = None, **overrides: Any) -> S:
    """Builds settings from a YAML file and overrides (None means: not given; dicts merge into sections).

    Raises ConfigError naming the first bad field and its bound.
    """
    values: dict[str, Any] = _read_yaml(path) if path else {}
    _merge(values, overrides)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or kind.__name__
        given = first.get("input")
        raise ConfigError(f"{field}: {first['msg']} (given: {given!r})", field=field) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}", field="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid YAML: {error}", field="config") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config: {path} must hold a mapping", field="config")
    return data


def _merge(into: dict[str, Any], overrides: dict[str, Any]) -> None:
    for key, value in overrides.items():
        if value is None:
            continue
        if isinstance(value, dict):
            section = into.setdefault(key, {})
            if isinstance(section, dict):
                _merge(section, value)
                continue
        into[key] = value
