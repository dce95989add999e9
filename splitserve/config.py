"""Validated, frozen settings of every part. Read once at start; nothing changes them afterwards.

Each setting can stand in a YAML file (`--config FILE`), and most have a command-line option that wins over
the file. The file of a command holds the fields of that command's settings; sections are nested mappings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from splitserve.admission_settings import AdmissionConfig
from splitserve.errors import ConfigError
from splitserve.fault_plan import FaultPlan
from splitserve.security_settings import CeilingConfig, SecuredPart
from splitserve.traffic_settings import CircuitBreaker, CircuitBreakerConfig, ModelRouteWeights

Port = Annotated[int, Field(ge=0, le=65535)]
HttpPort = Annotated[
    Port | None,
    BeforeValidator(lambda port: None if port == "off" else port),
    PlainSerializer(lambda port: "off" if port is None else port),
]
"""`off` is the option's word for None, which is what is not given on a command line."""
Routing = Literal["prefix", "least-wait", "round-robin"]
Workload = Annotated[str, Field(pattern=r"^(deployment|statefulset)/[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(_Settings):
    """How a worker computes."""

    kind: Literal["torch", "simulated"] = "torch"
    """`simulated` takes predictable time and needs no weights; for tests of everything around the engine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 (the simulated engine ignores it)."""
    quantization: Literal["none", "int8"] = "none"
    """`int8`, on cpu only: weights in int8 and activations quantized token by token, the output layer left in bfloat16.
    Faster, less memory, changes answers a little. The same on all workers of a model; see docs/quantization.md."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto`: cuda when there is one, else cpu."""
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    """What computes attention. `auto`: triton on cuda where it is installed, which it is with torch's CUDA builds, else
    torch. `flashinfer`: on cuda, bfloat16 only, with `pip install 'splitserve[flashinfer]'`."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """`auto`: steps that only decode are replayed as CUDA graphs, on cuda with triton attention; makes the start a few
    seconds longer."""
    block_size_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in one KV block. Must be equal on all workers of a model."""
    num_blocks: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """KV blocks in the pool. Default: what `kv_memory_bytes` holds."""
    kv_memory_bytes: Annotated[int, Field(ge=2**16)] | None = None
    """Memory of the KV pool, what a narrower `wire_dtype` takes beside it included. Default: 1 GiB on cpu, 80% of what
    is free after loading on cuda."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """`auto`: in bfloat16 on cpu, layers, attention and whole steps that only decode are computed by kernels that a C++
    compiler makes at the first start, where there is one and the processor has AVX-512 BF16; else by torch alone."""
    dense_rows_bytes: Annotated[int, Field(ge=0)] | None = None
    """Memory beside the pool, on cpu, in which decoding sequences have their KV once more in one piece; those without
    room there decode as well, only slower. Default: a quarter of the pool's; 0: none. Taken as it is needed."""
    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Token budget of one step; longer prompts are computed in chunks, and the KV of each is sent while the next one
    is computed. Default: 512 on cpu, 2048 on cuda."""
    max_running_requests: Annotated[int, Field(ge=1, le=65536)] = 64
    """Sequences in one step at most."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Sequences that may wait; one more is refused with RESOURCE_EXHAUSTED."""
    max_bypasses: Annotated[int, Field(ge=0, le=10**6)] = 16
    """How many later requests may overtake one that does not fit before it blocks the queue."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts and share it with later ones that begin alike."""
    context_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Prompt plus output tokens at most. Default and upper bound: the model's own."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compute threads. Default: the number of cores the worker may run on."""
    simulated_prefill_token_s: Annotated[float, Field(ge=0)] = 20e-6
    """Simulated engine: seconds a prompt token."""
    simulated_prefill_token2_s: Annotated[float, Field(ge=0)] = 0.0
    """Simulated engine: seconds a prompt token squared."""
    simulated_step_s: Annotated[float, Field(ge=0)] = 2e-3
    """Simulated engine: seconds a decode step takes at least."""
    simulated_context_token_s: Annotated[float, Field(ge=0)] = 0.0
    """Simulated engine: seconds a decode step for each token of context in the batch."""
    simulated_sequence_s: Annotated[float, Field(ge=0)] = 50e-6
    """Simulated engine: seconds a decode step for each sequence in the batch."""


class WorkerConfig(_Settings, SecuredPart):
    """One prefill or decode worker."""

    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Name, stable over restarts."""
    model: str
    """Embedded model's name, local folder, GGUF file or Hugging Face id; "simulated" needs no files."""
    served_model_name: str | None = None
    """Name that clients use. Default: the model's own short name."""
    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: Port = 0
    """0 takes a free port."""
    advertise_address: str | None = None
    """"host:port" told to coordinators. It must lead to this very process, not to a balancer: that connections to
    it are refused counts as proof that the process has ended. Default: host and the bound port."""
    coordinators: tuple[str, ...] = ()
    """"host:port" of each coordinator to register with."""
    transport: Literal["nixl", "ucx", "memory"] = "nixl"
    """How KV travels; the same on all workers of a model. `ucx` needs `pip install 'splitserve[ucx]'`; `memory`
    works inside one process only (tests)."""
    faults: FaultPlan | None = None
    """Section `faults`, for tests only: faults put into this worker's KV transfer. Default: none."""
    expected_lane_gb_per_s: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Prefill workers: least speed of the lane to a decode worker, in GB/s; 0 expects nothing. Default: a peer on
    this machine, or on another while this one has RDMA devices, must not be reached over TCP nor below 0.5 GB/s."""
    lane_policy: Literal["warn", "refuse"] = "warn"
    """What becomes of a lane slower than expected: a loud warning, or the pair is not used."""
    verify_kv: Literal["off", "sampled", "all"] = "off"
    """Decode workers: compare checksums of the KV blocks that arrive with those that were sent, of one block in 16 or
    of all, before a sequence is admitted."""
    wire_dtype: Literal["same", "fp8_e4m3"] = "same"
    """Type in which KV travels; the same on all workers of a model. `fp8_e4m3` sends half the bytes of bfloat16,
    changes answers a little and takes half as much memory again as the KV pool; see docs/transports.md."""
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long reserved blocks outlive the last sign of life of their coordinator."""
    quarantine_s: Annotated[float, Field(gt=0, le=7200)] = 45.0
    """How long aborted blocks wait for their writer before it is fenced; longer than the lease."""
    ticket_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Time from a reservation to its last write at most; a prompt that waits or computes longer is tried again.
    Blocks whose writer was stopped, or vanished with its machine, come back 10 s after it."""
    standby: bool = False
    """Stay out of rotation, loaded and connected, until an autoscaler's plan puts the worker into it."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long SIGTERM waits for running requests."""
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Time between load reports to the coordinators."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    cpus: tuple[int, ...] = ()
    """Cores to run on. Default: all that the process may use."""
    ceilings: CeilingConfig = CeilingConfig()
    """Section `ceilings`."""
    engine: EngineConfig = EngineConfig()
    """Section `engine`."""


class CoordinatorConfig(_Settings, SecuredPart):
    """The front door."""

    host: str = "127.0.0.1"
    """Interface to listen on. Beyond loopback use `tls` and `tenants`; see docs/security.md."""
    grpc_port: Port = 50051
    """0 takes a free port."""
    cluster_port: Port | None = None
    """With `tls` only: the port for workers and the autoscaler, where callers must show a certificate; 0 takes a free
    one. Default: the one after `grpc_port`."""
    http_port: HttpPort = 8000
    """Port of the OpenAI-compatible API; 0 takes a free one, `off` serves none."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Upper limit and default of a generation's time."""
    max_running_requests: Annotated[int, Field(ge=1, le=10**6)] = 4096
    """Generations in progress at most; one more is refused with RESOURCE_EXHAUSTED."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Silence after which a worker is dropped."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long SIGTERM waits for running generations."""
    no_worker_wait_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    """How long a request waits for a missing pool before UNAVAILABLE."""
    max_message_bytes: Annotated[int, Field(ge=2**16, le=2**30)] = 16 * 2**20
    """Largest gRPC message, and largest body of an HTTP request."""
    admission: AdmissionConfig = AdmissionConfig()
    """Section `admission`."""
    local_prefill: Literal["never", "auto", "always"] = "never"
    """Whether decode workers compute prompts themselves. `auto`: where measured rates say that it is sooner than a
    handoff, running batch included."""
    routing: Routing = "prefix"
    """How workers are chosen. `prefix`: least predicted time to first token, cached prefixes considered; `least-wait`:
    by load alone; `round-robin`: in turn, to compare with."""
    max_indexed_blocks: Annotated[int, Field(ge=1, le=10**9)] = 10_000_000
    """KV blocks of which the coordinator remembers who holds them; each takes about 67 bytes."""
    max_coalesce_ms: Annotated[float, Field(ge=0, le=1000)] = 10.0
    """How long an answer's later tokens may wait for each other, to leave as one message, when the coordinator's event
    loop is busy; while it is not, and for the first and last token, nothing waits. 0 never waits."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads for templating and tokenizing."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    model_routes: ModelRouteWeights = {}
    """Public model names, each with its served models and their weights, for example `smollm2: {smollm2-v1: 95,
    smollm2-v2: 5}`; see docs/model-routes.md. Default: clients name served models."""
    direct_model_names: Literal["allow", "hide"] = "allow"
    """Whether clients may also name the served models that are behind a route."""
    circuit_breaker: CircuitBreaker = CircuitBreakerConfig()
    """Section `circuit_breaker`."""
    tenants: Path | None = None
    """File of tenants with their API keys, models, quotas and weights. Default: everybody is let in."""


class ClusterConfig(_Settings):
    """A local cluster, as `splitserve up` starts it."""

    model: str = "smollm2-135m-instruct"
    """Embedded model's name, local folder, GGUF file or Hugging Face id; "simulated" needs no files."""
    served_model_name: str | None = None
    """Name that clients use. Default: the model's own short name."""
    prefill: Annotated[int, Field(ge=1, le=64)] = 1
    """Prefill workers."""
    decode: Annotated[int, Field(ge=1, le=64)] = 1
    """Decode workers."""
    coordinators: Annotated[int, Field(ge=1, le=64)] = 1
    """Coordinators beside each other, all with all workers; each further one on the next ports. More than one not with
    `autoscale`."""
    transport: Literal["nixl", "ucx"] = "nixl"
    """How KV travels. `ucx` needs `pip install 'splitserve[ucx]'`."""
    verify_kv: Literal["off", "sampled", "all"] = "off"
    """As in the workers' settings."""
    wire_dtype: Literal["same", "fp8_e4m3"] = "same"
    """As in the workers' settings."""
    pin_cores: bool = True
    """Give each worker its own cores where cores are few."""
    ready_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """How long loading may take."""
    autoscale: Path | None = None
    """Policy file. The number of workers then follows it, beginning at its `min_replicas` where `prefill` and `decode`
    are not given. Cores are shared by as many workers as the policy allows. Default: a fixed number of workers."""
    autoscale_interval_s: Annotated[float, Field(ge=0.1, le=3600)] | None = None
    """Time between scaling decisions. Default: the policy's."""
    autoscale_window_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Latencies of so long count in a scaling decision."""
    tls: Path | None = None
    """Folder as `splitserve certs` writes it, for all parts. Default: no encryption."""
    cluster_token_file: Path | None = None
    """File with the secret that coordinator and workers share. Default: a random one for each start."""
    engine: EngineConfig = EngineConfig()
    """Section `engine`, the same for all workers."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """Section `coordinator`."""


class KubernetesConfig(_Settings):
    """Where the pools' workloads are. Pods must have their own name as worker id."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] | None = None
    """Default: the autoscaler's own, or that of the kubeconfig's context."""
    prefill: Workload = "deployment/splitserve-prefill"
    """Workload of the prefill pool: kind and name."""
    decode: Workload = "deployment/splitserve-decode"
    """Workload of the decode pool: kind and name."""
    kubeconfig: Path | None = None
    """File that says how to reach the API server. Default: the pod's service account, or else `~/.kube/config`."""
    context: str | None = None
    """Context in the kubeconfig. Default: its current one."""
    request_timeout_s: Annotated[float, Field(gt=0, le=300)] = 5.0
    """Deadline of one call to the API server."""


class DockerConfig(_Settings):
    """The compose project whose workers are scaled. The Engine is the one that DOCKER_HOST names, or the local one."""

    project: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = "splitserve"
    """Compose project."""
    gpus: tuple[str, ...] = ()
    """GPUs that replicas may get, one each: numbers as `nvidia-smi -L` gives them, or UUIDs where workers see only
    their own; `auto` for all of the machine that the autoscaler runs on. Default: replicas need none."""
    request_timeout_s: Annotated[float, Field(ge=1, le=300)] = 10.0
    """Deadline of one request to the Engine."""


class AutoscalerConfig(_Settings, SecuredPart):
    """The autoscaler, where it runs as a service of its own."""

    policy: Path
    """Policy file."""
    coordinators: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:50051",)
    """"host:port" of each coordinator to observe and to tell."""
    actuator: Literal["docker", "kubernetes", "none"] = "none"
    """Where replicas live. `none`: decide and log only."""
    dry_run: bool = False
    """Observe replicas, decide and log, but act on nothing."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600)] | None = None
    """Time between decisions. Default: the policy's."""
    window_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Latencies of so long count in a decision."""
    model: str = ""
    """Only this model's traffic counts. Default: all that the coordinators serve."""
    api_key_file: Path | None = None
    """File with an admin key, for coordinators that have tenants and share neither `tls` nor a token. Default: none."""
    host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    docker: DockerConfig = DockerConfig()
    """Section `docker`."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Section `kubernetes`."""


S = TypeVar("S", bound=_Settings)


def load_settings(kind: type[S], path: Path | None = None, **overrides: Any) -> S:
    """Builds settings from a YAML file and overrides (None means: not given; dicts merge into sections).

    Raises ConfigError naming the first bad field and its bound.
    """
    values: dict[str, Any] = read_settings_file(path) if path else {}
    _merge(values, overrides)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or kind.__name__
        given = "" if first["type"] == "missing" else f" (given: {first.get('input')!r})"
        raise ConfigError(f"{field}: {first['msg']}{given}", field=field) from None


def read_settings_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML settings file, not validated yet. Raises ConfigError when there is none."""
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
