"""Settings of the coordinator: listening, admission, routing, circuit breakers and model routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from splitserve.config.base import Option, Port, Settings, idle_among
from splitserve.config.security import SecuritySettings
from splitserve.config.tracing import IDLE_AUTHORITY, RequestTracingConfig


def _parsed_routes(value: object) -> object:
    """Parses options "NAME=MODEL:WEIGHT,MODEL:WEIGHT"; a file has mappings instead."""
    if isinstance(value, str):
        value = [value]
    return dict(parse_route(text) for text in value) if isinstance(value, list | tuple) else value


def _route_texts(routes: dict[str, dict[str, float]]) -> list[str]:
    return [format_route(name, weights) for name, weights in routes.items()]


ModelRouteWeights = Annotated[
    dict[str, dict[str, float]],
    BeforeValidator(_parsed_routes),
    PlainSerializer(_route_texts, return_type=list[str]),
    Option(flag="model-route", metavar="NAME=MODEL:WEIGHT,..."),
]


class CircuitBreakerConfig(Settings):
    """Circuit breakers: when a worker, or the lane between two, is ejected because requests fail there."""

    enabled: bool = True
    """Whether breakers ever open."""
    consecutive_failures: Annotated[int, Field(ge=1, le=10**6)] = 5
    """Number of consecutive failures that opens a breaker."""
    failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed requests within `window_s` that opens a breaker."""
    min_requests: Annotated[int, Field(ge=1, le=256)] = 20
    """Fewest requests within `window_s` for a failure rate."""
    window_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Time window of the failure rate. A breaker that opens again within it stays open twice as long as before."""
    open_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """How long a breaker first stays open before it lets one request through."""
    max_open_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
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
    return f"{name}=" + ",".join(f"{model}:{_shortest(weight)}" for model, weight in weights.items())


def _shortest(weight: float) -> str:
    return str(weight).removesuffix(".0")


OnLate = Literal["serve", "refuse"]
"""What becomes of a request that is predicted to miss the target of its first token."""


class AdmissionConfig(Settings):
    """Admission control at the coordinator; see docs/admission.md."""

    mode: Annotated[Literal["queue", "off"], Option(flag="admission")] = "queue"
    """Where requests wait. `queue`: at the coordinator, in fair order, until workers can start them soon. `off`: at
    the workers, which receive them at once, first come, first served."""
    max_queued_requests: Annotated[int, Field(ge=1, le=10**6)] = 1024
    """Most queued requests of a model."""
    max_queued_prompt_tokens: Annotated[int, Field(ge=1, le=2**40)] = 2 * 2**20
    """Most queued prompt tokens of a model; each takes about 36 bytes of memory."""
    max_queue_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest time in the queue. A request that is predicted to wait longer is refused on arrival."""
    ttft_slo_s: Annotated[float, Field(ge=1e-6, le=86400)] | None = None
    """Target time to first token of interactive and standard requests, which are served so that as few as possible miss
    it. Default: none."""
    on_late: OnLate = "serve"
    """What becomes of a request that is predicted to miss the TTFT target of its tenant or `ttft_slo_s`. `serve`: it is
    served late, after those that can be in time. `refuse`: it is refused on arrival, with a hint when to try again."""
    tpot_slo_s: Annotated[float, Field(ge=1e-6, le=3600)] | None = None
    """Target time per output token of running requests; a request that would make steps longer than that waits, and a
    decode worker that computes prompts leaves its streams that time. Default: none."""
    prefill_horizon_s: Annotated[float, Field(gt=0, le=60)] = 0.3
    """Work sent to a prefill worker in advance. A lower value gives the coordinator's order more effect; below two
    steps of the worker plus its time to reserve KV it costs throughput."""
    decode_headroom: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Share of decode slots and KV that lower classes may not use within 30 s of a request of a higher class."""


class SpotMovesConfig(Settings):
    """How requests leave workers whose machines are taken away; see docs/operations.md."""

    margin_s: Annotated[float, Field(ge=0, le=3600), Option(flag="spot-margin")] = 3.0
    """How long before a machine is taken away all requests have left it."""
    moves_at_once: Annotated[int, Field(ge=1, le=1000), Option(flag="spot-moves")] = 4
    """Most requests of one such worker that are being resumed elsewhere at a time, unless time runs out."""


class RecordsConfig(Settings):
    """Records of single requests, which `splitserve explain` shows; see docs/observability.md. Each takes a few KB of
    memory."""

    max_recent_records: Annotated[int, Field(ge=0, le=10_000)] = 512
    """How many of the latest requests are kept; those that were refused do not count. With 0 here and in
    `max_notable_records`, none are made."""
    max_notable_records: Annotated[int, Field(ge=0, le=10_000)] = 128
    """How many are kept longer because they were slow, how many because they failed, and how many refused ones."""
    slow_ttft_s: Annotated[float, Field(gt=0, le=86400)] = 2.0
    """A request is slow from this time to its first token on."""
    slow_gap_s: Annotated[float, Field(gt=0, le=86400)] = 1.0
    """A request is slow from this time between two of its tokens on."""

    @property
    def enabled(self) -> bool:
        """Whether any records are kept."""
        return self.max_recent_records > 0 or self.max_notable_records > 0


class QualityConfig(Settings):
    """The quality watch: golden prompts that find wrong answers; see docs/observability.md."""

    policy: Annotated[Literal["off", "alarm", "isolate"], Option(flag="quality")] = "off"
    """`alarm`: golden prompts run through all pairs, and wrong answers raise metrics and name the worker or pair.
    `isolate`: besides, what is at fault gets no requests until its answers are right again."""
    interval_s: Annotated[float, Field(ge=0.1, le=86400), Option(flag="quality-interval")] = 60.0
    """Pause between two rounds, in seconds."""
    max_probes: Annotated[int, Field(ge=2, le=256), Option(flag="quality-probes")] = 16
    """Most golden prompts of a model in a round, each of 64 tokens and an answer of 8. Where there are more pairs and
    decode workers, rounds take turns."""
    clean_rounds: Annotated[int, Field(ge=1, le=1000), Option(flag="quality-clean-rounds")] = 3
    """Right answers in a row after which what was found wrong counts as right again."""
    min_tolerance_nats: Annotated[float, Field(gt=0, le=1), Option(flag="quality-min-tolerance")] = 0.02
    """Least tolerance: a Kullback-Leibler divergence from the reference answer up to this is never wrong."""
    max_tolerance_nats: Annotated[float, Field(gt=0, le=10), Option(flag="quality-max-tolerance")] = 0.1
    """Greatest tolerance, whatever clean rounds measure, and that of the first round."""
    prompts: Annotated[Path | None, Option(flag="quality-prompts")] = None
    """Text file of golden prompts, one a line, at most 64. Default: built-in ones."""

    @model_validator(mode="after")
    def _check_tolerances(self) -> Self:
        if self.min_tolerance_nats > self.max_tolerance_nats:
            raise ValueError("min_tolerance_nats must not exceed max_tolerance_nats")
        return self


HttpPort = Annotated[
    Port | None,
    BeforeValidator(lambda port: None if port == "off" else port),
    PlainSerializer(lambda port: "off" if port is None else port),
    Option(metavar="PORT|off"),
]
"""`off` stands for None on the command line, where None means not given."""
Routing = Literal["prefix", "least-wait", "round-robin"]


class CoordinatorConfig(SecuritySettings):
    """The coordinator, which clients talk to."""

    host: str = "127.0.0.1"
    """Interface to listen on. Beyond loopback use `tls` and `tenants`; see docs/security.md."""
    grpc_port: Port = 50051
    """Port of the gRPC API; 0 takes a free one."""
    cluster_port: Port | None = None
    """With `tls` only: the port for workers and the autoscaler. Callers must present a certificate; 0 takes a free
    port. Default: the port after `grpc_port`."""
    http_port: HttpPort = 8000
    """Port of the OpenAI-compatible API; 0 takes a free one, `off` serves none."""
    page: Literal["on", "off"] = "on"
    """Whether the HTTP port serves the page at `/`, which shows what the cluster does; see docs/observability.md."""
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
    admission: Annotated[AdmissionConfig, Option(panel="Admission")] = AdmissionConfig()
    """Section `admission`."""
    records: Annotated[RecordsConfig, Option(panel="Records")] = RecordsConfig()
    """Section `records`."""
    quality: Annotated[QualityConfig, Option(panel="Quality")] = QualityConfig()
    """Section `quality`."""
    tracing: Annotated[RequestTracingConfig, Option(panel="Tracing")] = RequestTracingConfig()
    """Section `tracing`."""
    hybrid: Literal["on", "off"] = "on"
    """Whether decode workers may compute prompts that have a target for their first token: where the prefill worker is
    not soon ready and the decode worker is in time. `off` leaves those prompts to `local_prefill` too."""
    local_prefill: Literal["never", "auto", "always"] = "never"
    """Whether decode workers compute the other prompts themselves. `auto`: if measured rates predict that it is faster
    than a handoff, with the running batch taken into account. `always`: all prompts, with a target or without."""
    peer_fetch: Literal["on", "off"] = "off"
    """Whether a worker that lacks a prefix gets it from another one's cache where that is predicted to be sooner than
    computing it; see docs/routing.md. Prefill and decode workers give and take them with their own `peer_fetch: on`,
    which `splitserve up` gives them."""
    leanings: Literal["auto", "fixed"] = "auto"
    """Who says where neutral workers lean. `auto`: the coordinator moves them to where the targets `ttft_slo_s` and
    `tpot_slo_s` are in danger, under an autoscaler those that its plan leaves to it; without both targets they stay
    where they are. `fixed`: only such a plan."""
    routing: Routing = "prefix"
    """How workers are chosen. `prefix`: lowest predicted time to first token, cached prefixes included; `least-wait`:
    by load alone; `round-robin`: in turn, as a baseline."""
    max_indexed_blocks: Annotated[int, Field(ge=1, le=10**9)] = 10_000_000
    """Most KV blocks in the coordinator's prefix index; each takes about 67 bytes."""
    max_coalesce_ms: Annotated[float, Field(ge=0, le=1000)] = 10.0
    """Longest time in milliseconds that output tokens are held back to leave as one message while the coordinator's
    event loop is busy. The first and last token are never held back; short calls to workers are, for 2 ms of it at
    most. 0 disables it."""
    long_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] = 512
    """Prompts of so many tokens or more count as long: metrics and `splitserve top` show their times to the first token
    apart."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads for chat templates and tokenization."""
    tokenizers: Annotated[tuple[str, ...], Field(max_length=64), Option(flag="tokenizer")] = ()
    """Models whose tokenizers are loaded at the start, named as workers name them: a first worker does not wait for
    that then. What cannot be loaded is tried again when it comes. `splitserve up` gives its model. Default: none."""
    metrics_port: Port | None = None
    """Port of a Prometheus endpoint on `host`; 0 takes a free one. Default: no endpoint."""
    model_routes: ModelRouteWeights = Field(default_factory=dict)
    """Public model names, each with its served models and their weights. For example `smollm2: {smollm2-v1: 95,
    smollm2-v2: 5}`; see docs/model-routes.md. Default: clients name served models."""
    model_routes_file: Path | None = None
    """YAML file of model routes, `NAME: {MODEL: WEIGHT}`, reloaded when it changes. Its routes win over those of
    `model_routes`. Default: none."""
    direct_model_names: Literal["allow", "hide"] = "allow"
    """Whether clients may also name the served models behind a route."""
    spot: Annotated[SpotMovesConfig, Option(panel="Spot")] = SpotMovesConfig()
    """Section `spot`: how requests leave workers whose machines are taken away."""
    circuit_breaker: CircuitBreaker = CircuitBreakerConfig()
    """Section `circuit_breaker`: when a worker or a lane is ejected."""
    tenants: Path | None = None
    """File of tenants with their API keys, models, quotas and weights. Default: no authentication of clients."""
    prices: Path | None = None
    """With `tenants`: file of prices, from which the metrics say what each tenant's requests cost in money; see
    docs/operations.md. Reloaded when it changes. Default: none."""

    def idle_settings(self) -> dict[str, str]:
        """The settings that the others leave without effect, with the reason."""
        has_page = self.page == "on" and self.http_port is not None
        return idle_among(
            cluster_port=(self.cluster_port is not None and self.tls is None, "without tls"),
            tracing__authority=(self.tracing.has_idle_authority, IDLE_AUTHORITY),
            page_token_file=(self.page_token_file is not None and not has_page, "without page and http_port"),
        )
