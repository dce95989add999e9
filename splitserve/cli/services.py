"""`splitserve coordinator`, `prefill-worker`, `decode-worker`, `autoscaler`: run one service in this process."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from splitserve.addresses import check_address
from splitserve.cli import options
from splitserve.core_layout import parse_cores
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.config import WorkerConfig

PANEL = "Services, one process each"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Pool = Literal["prefill", "decode"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("coordinator", rich_help_panel=PANEL)(coordinator)
    app.command("prefill-worker", rich_help_panel=PANEL, help="Run a prefill worker: prompts in, KV out.")(
        _worker_command
    )
    app.command("decode-worker", rich_help_panel=PANEL, help="Run a decode worker: KV in, tokens out.")(
        _worker_command
    )
    app.command("autoscaler", rich_help_panel=PANEL)(autoscaler)


def autoscaler(
    ctx: typer.Context,
    config: options.Config = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="How each pool scales. Required, here or in the settings."),
    ] = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Coordinator to observe and to tell; may be given again."),
    ] = None,
    actuator: Annotated[
        str | None,
        typer.Option(
            metavar="docker|kubernetes|none", help="Where replicas live. Default: none, which only logs."
        ),
    ] = None,
    dry_run: Annotated[
        bool | None, typer.Option("--dry-run/--no-dry-run", help="Decide and log, but act on nothing.")
    ] = None,
    interval: options.ScalingInterval = None,
    window: options.ScalingWindow = None,
    host: Annotated[str | None, typer.Option(help="Interface of the Prometheus endpoint.")] = None,
    metrics_port: options.MetricsPort = None,
    project: Annotated[
        str | None,
        typer.Option(envvar="COMPOSE_PROJECT_NAME", help="Compose project to scale. Default: splitserve."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="0,1,...|auto", envvar="SPLITSERVE_GPUS", help="GPUs for Docker replicas, one each."
        ),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace. Default: one's own.")] = None,
    tls: options.Tls = None,
    cluster_token_file: options.ClusterTokenFile = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Admin key, for coordinators that ask for one.")
    ] = None,
) -> None:
    """Run the autoscaler: as many workers in each pool as its policy asks for."""
    from splitserve.config import AutoscalerConfig, load_settings
    from splitserve.service_arguments import AUTOSCALER_OPTIONS, to_settings

    for address in coordinator or ():
        check_address(address, "coordinator")
    given = dict(ctx.params)
    given["gpus"] = None if gpus is None else tuple(gpu for gpu in gpus.split(",") if gpu)
    settings = load_settings(AutoscalerConfig, config, **to_settings(given, AUTOSCALER_OPTIONS))
    _configure_logging("autoscaler")
    from autoscaler.service import serve

    _run(serve(settings))


def coordinator(
    ctx: typer.Context,
    config: options.Config = None,
    host: options.Host = None,
    grpc_port: options.GrpcPort = None,
    http_port: options.HttpPort = None,
    request_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A generation's time at most. Default: 600.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Generations in progress at most. Default: 4096.")
    ] = None,
    heartbeat_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Silence that drops a worker. Default: 5.")
    ] = None,
    drain: options.Drain = None,
    no_worker_wait: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long to wait for a missing pool. Default: 2.")
    ] = None,
    max_message_bytes: Annotated[
        int | None, typer.Option(help="Largest message accepted. Default: 16 MiB.")
    ] = None,
    local_prefill: Annotated[
        str | None,
        typer.Option(
            metavar="never|auto|always", help="Decode workers compute prompts themselves. Default: never."
        ),
    ] = None,
    admission: options.Admission = None,
    max_queued_requests: options.MaxQueuedRequests = None,
    max_queued_prompt_tokens: options.MaxQueuedPromptTokens = None,
    max_queue: options.MaxQueue = None,
    ttft_slo: options.TtftSlo = None,
    tpot_slo: options.TpotSlo = None,
    prefill_horizon: options.PrefillHorizon = None,
    decode_headroom: options.DecodeHeadroom = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="prefix|least-wait|round-robin", help="How workers are chosen. Default: prefix."
        ),
    ] = None,
    max_indexed_blocks: Annotated[
        int | None, typer.Option(help="KV blocks known by their holders, at most. Default: 10000000.")
    ] = None,
    max_coalesce_ms: Annotated[
        float | None, typer.Option(help="How long tokens may wait for each other under load. Default: 10.")
    ] = None,
    tokenizer_threads: Annotated[
        int | None, typer.Option(help="Threads for templating and tokenizing. Default: 2.")
    ] = None,
    metrics_port: options.MetricsPort = None,
    cluster_port: options.ClusterPort = None,
    tls: options.Tls = None,
    cluster_token_file: options.ClusterTokenFile = None,
    tenants: options.Tenants = None,
    model_route: options.ModelRoute = None,
    direct_model_names: options.DirectModelNames = None,
    circuit_breaker: options.CircuitBreaker = None,
) -> None:
    """Run the coordinator: the front door that routes requests to workers."""
    from splitserve.config import CoordinatorConfig, load_settings
    from splitserve.service_arguments import COORDINATOR_OPTIONS, to_settings

    settings = load_settings(CoordinatorConfig, config, **to_settings(ctx.params, COORDINATOR_OPTIONS))
    _configure_logging("coordinator")
    from coordinator.service import serve

    _run(serve(settings))


def _worker_command(
    ctx: typer.Context,
    config: options.Config = None,
    worker_id: Annotated[
        str | None, typer.Option(help="Name, stable over restarts. Default: POOL-HOSTNAME-PID.")
    ] = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    host: options.Host = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: a free one.")] = None,
    advertise_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address told to coordinators.")
    ] = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Coordinator to register with; may be given again."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="How KV travels: nixl or ucx. Default: nixl.")] = None,
    lease: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long reservations outlive their coordinator. Default: 30."),
    ] = None,
    quarantine: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long aborted blocks wait for their writer. Default: 45."),
    ] = None,
    ticket: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="From reservation to last write at most. Default: 120."),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby/--no-standby", help="Wait out of rotation until an autoscaler's plan says go."
        ),
    ] = None,
    drain: options.Drain = None,
    heartbeat: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Between load reports. Default: 0.5.")
    ] = None,
    expected_lane: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Least speed of a lane to a decode worker; 0 expects nothing."),
    ] = None,
    lane_policy: Annotated[
        str | None, typer.Option(help="A slower lane: warn (default), or refuse the pair.")
    ] = None,
    verify_kv: options.VerifyKv = None,
    wire_dtype: options.WireDtype = None,
    metrics_port: options.MetricsPort = None,
    cpus: Annotated[
        str | None, typer.Option(metavar="CORES", help='Cores to run on, as "0,1" or "0-3".')
    ] = None,
    tls: options.Tls = None,
    cluster_token_file: options.ClusterTokenFile = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Output tokens of one request at most. Default: the context's.")
    ] = None,
    require_cache_salt: Annotated[
        bool | None,
        typer.Option(
            "--require-cache-salt/--no-require-cache-salt",
            help="Refuse requests that would share their KV with everybody's. Default: no.",
        ),
    ] = None,
    engine: options.Engine = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    device: options.Device = None,
    attention_backend: options.AttentionBackend = None,
    cuda_graphs: options.CudaGraphs = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    kv_memory_bytes: options.KvMemoryBytes = None,
    cpu_kernels: options.CpuKernels = None,
    dense_rows_bytes: options.DenseRowsBytes = None,
    max_step_tokens: options.MaxStepTokens = None,
    max_running_requests: options.MaxRunningRequests = None,
    max_waiting_requests: options.MaxWaitingRequests = None,
    max_bypasses: options.MaxBypasses = None,
    prefix_cache: options.PrefixCache = None,
    context_tokens: options.ContextTokens = None,
    threads: options.Threads = None,
    simulated_prefill_token_s: options.Hidden = None,
    simulated_prefill_token2_s: options.Hidden = None,
    simulated_step_s: options.Hidden = None,
    simulated_context_token_s: options.Hidden = None,
    simulated_sequence_s: options.Hidden = None,
) -> None:
    from splitserve.config import WorkerConfig, load_settings, read_settings_file
    from splitserve.service_arguments import WORKER_OPTIONS, to_settings

    pool: Pool = "prefill" if ctx.info_name == "prefill-worker" else "decode"
    for address in coordinator or ():
        check_address(address, "coordinator")
    given = dict(ctx.params)
    given["cpus"] = None if cpus is None else parse_cores(cpus)
    if worker_id is None and (config is None or "worker_id" not in read_settings_file(config)):
        given["worker_id"] = _default_worker_id(pool)
    settings = load_settings(WorkerConfig, config, **to_settings(given, WORKER_OPTIONS))
    _run_worker(pool, settings)


def _run_worker(pool: Pool, settings: WorkerConfig) -> None:
    _configure_logging(settings.worker_id)
    _claim_cores(settings)
    # Imported only now: torch reads the number of threads when it is imported.
    if pool == "prefill":
        from prefill_worker.service import serve
    else:
        from decode_worker.service import serve
    _run(serve(settings))


def _claim_cores(settings: WorkerConfig) -> None:
    """Applies `cpus` and `threads` to this process, before anything computes in it."""
    if settings.cpus:
        try:
            os.sched_setaffinity(0, settings.cpus)
        except OSError as error:
            raise ConfigError(
                f"cpus: cannot run on {settings.cpus}: {error.strerror}", field="cpus"
            ) from None
    threads = settings.engine.threads or (len(settings.cpus) if settings.cpus else None)
    if threads is not None:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))


def _default_worker_id(pool: Pool) -> str:
    """POOL-HOSTNAME-PID, within what a worker id may hold."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
    return f"{pool}-{host}-{os.getpid()}"


def _configure_logging(part: str) -> None:
    from splitserve.logs import configure_logging

    configure_logging(part)


def _run(service: Coroutine[Any, Any, None]) -> None:
    import faulthandler
    import signal

    import uvloop

    from splitserve.logs import log_exception
    from splitserve.rpc_errors import known_error

    # kill -USR2 shows what every thread is doing.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        uvloop.run(service)
    except Exception as error:
        # The log keeps the traceback of what nobody expected; people get the one line.
        if known_error(error) is None:
            log_exception("service.failed", error)
        raise
