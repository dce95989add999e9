"""Settings of the coordinator: listening, admission, routing, circuit breakers and model routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from splitserve.addresses import MAX_PORT
from splitserve.config.base import BASIC, INTERNAL, Option, Port, Settings, idle_among
from splitserve.config.security import SecuritySettings
from splitserve.config.tracing import IDLE_AUTHORITY, RequestTracingConfig


def _parsed_routes(value: object) -> object:
    """Parses options "NAME=MODEL:WEIGHT,MODEL:WEIGHT"; a file has mappings instead."""
    if isinstance(value, str):
        value = [value]
    return dict(parse_route(text) for text in value) if isinstance(value, list | tuple) else value


ModelRouteWeights = Annotated[
    dict[str, dict[str, float]],
    BeforeValidator(_parsed_routes),
    PlainSerializer(lambda routes: [format_route(*route) for route in routes.items()], return_type=list[str]),
    Option(flag="model-route", metavar="NAME=MODEL:WEIGHT,..."),
]


class CircuitBreakerConfig(Settings):
    """Circuit breakers: when a worker, or the lane between two, is ejected because requests fail there."""

    enabled: bool = True
    """Whether breakers ever open."""
    consecutive_failures: Annotated[int, Field(ge=1, le=10**6)] = 5
    """Number of consecutive failures that opens a breaker."""
    window_s: Annotated[float, Field(gt=0, le=3600), INTERNAL] = 30.0
    """A breaker that opens again within this time after it has closed stays open twice as long as before."""
    open_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """How long a breaker first stays open before it lets one request through."""
    max_open_s: Annotated[float, Field(gt=0, le=86400), INTERNAL] = 60.0
    """Longest time that a breaker stays open."""


def _parsed_breaker(value: object) -> object:
    """Parses an option "NAME=VALUE,NAME=VALUE"; a file has a mapping instead."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("it is written NAME=VALUE,..., for example enabled=false")
    return {name: given for name, _, given in pairs}


def _breaker_text(breaker: CircuitBreakerConfig) -> str:
    given = breaker.model_dump(exclude_defaults=True)
    return ",".join(f"{name}={value}" for name, value in given.items())


CircuitBreaker = Annotated[
    CircuitBreakerConfig,
    BeforeValidator(_parsed_breaker),
    PlainSerializer(_breaker_text, return_type=str),
    Option(flag="circuit-breaker", metavar="NAME=VALUE,..."),
]


def parse_route(text: str) -> tuple[str, dict[str, float]]:
    """Parses "NAME=MODEL:WEIGHT,..." to a name and weights. Raises ValueError with the expected form."""
    name, equals, shares = text.partition("=")
    if not name or not equals:
        raise ValueError(f"a route is written NAME=MODEL:WEIGHT,..., not {text!r}")
    return name, parse_weights([share.rpartition(":")[::2] for share in shares.split(",") if share])


def parse_weights(shares: list[tuple[str, str]]) -> dict[str, float]:
    """Weights by model, from pairs of strings. Raises ValueError for an invalid number or a repeated model."""
    weights: dict[str, float] = {}
    for model, weight in shares:
        if not model or model in weights:
            raise ValueError(f"each share needs a different model and a weight: {model!r}")
        weights[model] = float(weight)
    return weights


def format_route(name: str, weights: Mapping[str, float]) -> str:
    """The inverse of `parse_route`."""
    shares = [f"{model}:{str(weight).removesuffix('.0')}" for model, weight in weights.items()]
    return f"{name}={','.join(shares)}"


OnLate = Literal["serve", "refuse"]
"""What becomes of a request that is predicted to miss the target of its first token."""


class AdmissionConfig(Settings):
    """Admission control at the coordinator; see docs/guides/routing.md."""

    mode: Annotated[Literal["queue", "off"], Option(flag="admission")] = "queue"
    """Where requests wait. `queue`: at the coordinator, in fair order, until workers can start them soon. `off`: at
    the workers, which receive them at once, first come, first served."""
    max_queued_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Most queued requests of a model."""
    max_queued_prompt_tokens: Annotated[int, Field(ge=1, le=2**40), INTERNAL] = 2 * 2**20
    """Most queued prompt tokens of a model; each takes about 36 bytes of memory."""
    max_queue_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time in the queue. A request that is predicted to wait longer is refused on arrival."""
    ttft_slo_s: Annotated[float, Field(ge=1e-6, le=86400), BASIC] | None = None
    """Target time to the first token. Interactive and standard requests are served so that as few as possible miss it.
    Default: none."""
    on_late: OnLate = "serve"
    """What becomes of a request that is predicted to miss the TTFT target of its tenant or `ttft_slo_s`. `serve`: it is
    served late, after those that can be in time. `refuse`: it is refused on arrival, with a hint when to try again."""
    tpot_slo_s: Annotated[float, Field(ge=1e-6, le=3600), BASIC] | None = None
    """Target time per output token. A request that would make steps longer than that waits, and a decode worker that
    computes prompts leaves its streams that time. Default: none."""
    prefill_horizon_s: Annotated[float, Field(gt=0, le=60), INTERNAL] = 0.3
    """Work sent to a prefill worker in advance. A lower value gives the coordinator's order more effect; below two
    steps of the worker plus its time to reserve KV it costs throughput."""


class RecordsConfig(Settings):
    """Records of single requests, which `splitserve explain` shows; see docs/guides/observability.md. Each takes a few
    KB of memory."""

    max_recent_records: Annotated[int, Field(ge=0, le=10_000)] = 512
    """How many of the latest requests are kept; those that were refused do not count. With 0 here and in
    `max_notable_records`, none are made."""
    max_notable_records: Annotated[int, Field(ge=0, le=10_000)] = 128
    """How many are kept longer because they were slow, how many because they failed, and how many refused ones."""
    slow_ttft_s: Annotated[float, Field(gt=0, le=86400)] = 2.0
    """A request is slow from this time to its first token on."""
    slow_gap_s: Annotated[float, Field(gt=0, le=86400), INTERNAL] = 1.0
    """A request is slow from this time between two of its tokens on."""

    @property
    def enabled(self) -> bool:
        """Whether any records are kept."""
        return self.max_recent_records > 0 or self.max_notable_records > 0


class CanaryConfig(Settings):
    """The canary: golden prompts at an interval; see docs/guides/observability.md."""

    interval_s: Annotated[float, Field(ge=0, le=86400), Option(flag="canary-interval")] = 0.0
    """Pause between two rounds of golden prompts, in seconds; 0: off. An answer that differs from the reference raises
    an alarm."""
    prompts: Annotated[Path | None, Option(flag="canary-prompts")] = None
    """Text file of golden prompts, one a line, at most 64. Default: built-in ones."""


HttpPort = Annotated[
    Port | None,
    BeforeValidator(lambda port: None if port == "off" else port),
    PlainSerializer(lambda port: "off" if port is None else port),
    Option(metavar="PORT|off", tier="basic"),
]
"""`off` stands for None on the command line, where None means not given."""
ToolFormatName = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "gemma",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "kimi_k3",
    "llama",
    "llama_pythonic",
    "minimax",
    "minimax_m1",
    "mistral",
    "mistral_v3",
    "phi4",
    "qwen_xml",
]
ReasoningFormatName = Literal["auto", "none", "gemma", "granite", "harmony", "kimi_k3", "mistral", "think"]
LocalPrefill = Literal["never", "auto", "always"]
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?")
DEFAULT_PORTS = {"http": "80", "https": "443"}


def _can_match(origin: str) -> str:
    """Refuses an origin that no browser sends: it is compared as it is."""
    parts = ORIGIN.fullmatch(origin)
    port = parts[3] if parts else None
    is_sent = parts and (port is None or (int(port) <= MAX_PORT and DEFAULT_PORTS.get(parts[1]) != port))
    if origin != "*" and not is_sent:
        raise ValueError("must be * or scheme://host[:port], lower case, no path, no default port")
    return origin


Origin = Annotated[str, Field(max_length=512), AfterValidator(_can_match)]


class CoordinatorConfig(SecuritySettings):
    """The coordinator, which clients talk to."""

    host: Annotated[str, BASIC] = "127.0.0.1"
    """Interface to listen on. Beyond loopback use `tls` and `tenants`; see docs/guides/security.md."""
    grpc_port: Annotated[Port, BASIC] = 50051
    """Port of the gRPC API; 0 takes a free one."""
    cluster_port: Port | None = None
    """With `tls` only: the port for workers and the autoscaler. Callers must present a certificate; 0 takes a free
    port. Default: the port after `grpc_port`."""
    http_port: HttpPort = 8000
    """Port of the OpenAI-compatible API; 0 takes a free one, `off` serves none."""
    allowed_origins: Annotated[tuple[Origin, ...], Field(max_length=64)] = ()
    """Origins whose pages may call the HTTP API from a browser, such as `https://app.example`, or `*` for all of them
    (CORS); see docs/guides/security.md. Default: none, but this server's own page."""
    page: Literal["on", "off"] = "on"
    """Whether the HTTP port serves the page at `/`, which shows what the cluster does; see
    docs/guides/observability.md."""
    page_token_file: Path | None = None
    """File with the secret that the page asks for, 16 to 1024 printable characters. With `tenants` an admin's API key
    is asked for instead. Default: none, and where `host` is no loopback address the page then shows nothing."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Upper limit and default of a generation's timeout."""
    max_running_requests: Annotated[int, Field(ge=1, le=10**6)] = 4096
    """Most generations in progress; further ones are refused with RESOURCE_EXHAUSTED."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Time without a report after which a worker is dropped."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long to wait for running generations after SIGTERM."""
    no_worker_wait_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    """How long a request waits while a pool has no worker, before it fails with UNAVAILABLE."""
    max_message_bytes: Annotated[int, Field(ge=2**16, le=2**30)] = 4 * 2**20
    """Largest gRPC message. A client's request, over gRPC or HTTP, may have 2 MiB, or 16 bytes per token of the longest
    context among the models if that is more, but never more than this."""
    max_connections: Annotated[int, Field(ge=1, le=10**6)] = 10_000
    """Most open connections on each port; further ones are closed at once. Lowered to what the limit of open files
    leaves, which is raised to its hard limit at start."""
    admission: AdmissionConfig = AdmissionConfig()
    """Section `admission`."""
    request_log: Path | None = None
    """File that gets one JSON line for each request at its end: times, lengths, prefix hashes, workers and outcome, no
    content. `splitserve simulate` and `splitserve plan` read it. Default: none."""
    request_log_max_bytes: Annotated[int, Field(ge=2**16, le=2**40)] = 256 * 2**20
    """Size at which the request log is renamed to FILE.1, in place of the one before, and begun anew."""
    batch_folder: Path | None = None
    """Folder of the files and batches of `/v1/files` and `/v1/batches`, for this coordinator alone; see
    docs/guides/batch.md. Default: none, and these paths refuse requests."""
    batch_concurrency: Annotated[int, Field(ge=1, le=10**4)] = 32
    """Most lines of batches that are served at a time."""
    records: RecordsConfig = RecordsConfig()
    """Section `records`."""
    canary: CanaryConfig = CanaryConfig()
    """Section `canary`."""
    tracing: RequestTracingConfig = RequestTracingConfig()
    """Section `tracing`."""
    local_prefill: LocalPrefill = "auto"
    """Whether decode workers compute prompts themselves. `auto`: where that brings the first token sooner than the
    prefill worker by the workers' latency models, and their streams keep the strictest `tpot_ms` meanwhile; without
    such a target only where at most 256 prompt tokens are not cached. `always`: all prompts."""
    warm_prefixes: Annotated[int, Field(ge=0, le=64)] = 8
    """How many of the hottest prefixes of recent prompts a new worker computes before it gets requests, while others
    serve its model; see docs/guides/routing.md. With 0: none."""
    max_coalesce_ms: Annotated[float, Field(ge=0, le=1000), INTERNAL] = 10.0
    """Longest time in milliseconds that output tokens are held back to leave as one message while the coordinator's
    event loop is busy. The first and last token are never held back; short calls to workers are, for 2 ms of it at
    most. 0 disables it."""
    long_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] = 512
    """Prompts of so many tokens or more count as long: metrics and `splitserve top` show their times to the first token
    apart."""
    tokenizers: Annotated[tuple[str, ...], Field(max_length=64), Option(flag="tokenizer")] = ()
    """Models whose tokenizers are loaded at the start, named as workers name them: a first worker does not wait for
    that then. What cannot be loaded is tried again when it comes. `splitserve up` gives its model. Default: none."""
    tool_format: ToolFormatName = "auto"
    """How models write tool calls; see docs/guides/openai-api.md. `auto`: as the model's chat template shows it, else
    as Hermes does. `none`: calls are left in the text."""
    reasoning_format: ReasoningFormatName = "auto"
    """How models write their reasoning. `auto`: as the model's chat template shows it. `none`: it is left in the
    text."""
    trust_request_chat_template: bool = False
    """Whether requests may bring chat templates of their own. They run in the sandbox, as models' templates do; to
    compile one may hold up other requests for a second."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    model_routes: ModelRouteWeights = Field(default_factory=dict)
    """Public model names, each with its served models and their weights. For example `smollm2: {smollm2-v1: 95,
    smollm2-v2: 5}`; see docs/guides/models-and-engines.md. Default: clients name served models."""
    model_routes_file: Path | None = None
    """YAML file of model routes, `NAME: {MODEL: WEIGHT}`, reloaded when it changes. Its routes win over those of
    `model_routes`. Default: none."""
    direct_model_names: Literal["allow", "hide"] = "allow"
    """Whether clients may also name the served models behind a route."""
    circuit_breaker: CircuitBreaker = CircuitBreakerConfig()
    """Section `circuit_breaker`: when a worker or a lane is ejected."""
    tenants: Annotated[Path | None, BASIC] = None
    """File of tenants: API keys, models, quotas, weights. Default: no authentication of clients."""

    def idle_settings(self) -> dict[str, str]:
        """The settings that the others leave without effect, with the reason."""
        has_page = self.page == "on" and self.http_port is not None
        return idle_among(
            request_log_max_bytes=(
                self.request_log is None and "request_log_max_bytes" in self.model_fields_set,
                "without request_log",
            ),
            batch_folder=(self.batch_folder is not None and self.http_port is None, "without http_port"),
            batch_concurrency=(
                self.batch_folder is None and "batch_concurrency" in self.model_fields_set,
                "without batch_folder",
            ),
            cluster_port=(self.cluster_port is not None and self.tls is None, "without tls"),
            tracing__authority=(self.tracing.has_idle_authority, IDLE_AUTHORITY),
            allowed_origins=(bool(self.allowed_origins) and self.http_port is None, "without http_port"),
            page_token_file=(self.page_token_file is not None and not has_page, "without page and http_port"),
        )
