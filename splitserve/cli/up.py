"""`splitserve up`: starts and supervises a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.addresses import claim_port
from splitserve.cli import options
from splitserve.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from autoscaler.local_scaling import LocalScaling
    from splitserve.cluster_setup import CommandFactory
    from splitserve.config import ClusterConfig
    from splitserve.local_cluster import LocalCluster
    from splitserve.part_security import PartSecurity
    from splitserve.restart_policy import RestartPolicy

EXIT_KILLED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("up")(up)


def up(
    ctx: typer.Context,
    model: options.Model = None,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers. Default: 1, or the policy's least.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Decode workers. Default: 1, or the policy's least.")
    ] = None,
    coordinators: Annotated[
        int | None, typer.Option(help="Coordinators, on consecutive ports. Default: 1.")
    ] = None,
    host: options.Host = None,
    grpc_port: options.GrpcPort = None,
    http_port: options.HttpPort = None,
    config: options.Config = None,
    served_model_name: options.ServedModelName = None,
    ready_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long loading may take. Default: 300.")
    ] = None,
    drain: options.Drain = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each process's log to a file there.")
    ] = None,
    pin_cores: Annotated[
        bool | None,
        typer.Option("--pin-cores/--no-pin-cores", help="Give each worker its own cores. Default: yes."),
    ] = None,
    autoscale: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Scale both pools by this policy. Default: fixed.")
    ] = None,
    autoscale_interval: options.ScalingInterval = None,
    autoscale_window: options.ScalingWindow = None,
    tls: options.Tls = None,
    cluster_port: options.ClusterPort = None,
    cluster_token_file: options.ClusterTokenFile = None,
    tenants: options.Tenants = None,
    verify_kv: options.VerifyKv = None,
    wire_dtype: options.WireDtype = None,
    engine: options.Engine = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    device: options.Device = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    max_step_tokens: options.MaxStepTokens = None,
    context_tokens: options.ContextTokens = None,
    threads: options.Threads = None,
) -> None:
    """Start a local cluster and keep it running until Ctrl-C, which drains it; a second one kills it."""
    from splitserve.config import ClusterConfig, load_settings
    from splitserve.service_arguments import CLUSTER_OPTIONS, to_settings

    settings = load_settings(ClusterConfig, config, **to_settings(ctx.params, CLUSTER_OPTIONS))
    front = settings.coordinator
    ports = {"grpc_port": claim_port(front.host, front.grpc_port)}
    if front.http_port is not None:
        ports["http_port"] = claim_port(front.host, front.http_port, "http_port")
    if settings.tls is not None:
        after = front.grpc_port + 1 if front.grpc_port else 0
        wanted = after if front.cluster_port is None else front.cluster_port
        ports["cluster_port"] = claim_port(front.host, wanted)
    settings = settings.model_copy(update={"coordinator": front.model_copy(update=ports)})
    _claim_further_ports(settings)
    _provide_model(settings)
    if asyncio.run(run_cluster(settings, log_dir)):
        raise typer.Exit(EXIT_KILLED)


def _claim_further_ports(config: ClusterConfig) -> None:
    """Makes sure that every further coordinator can have its ports. Raises UnavailableError naming the taken one."""
    from splitserve.cluster_setup import each_coordinator

    if config.coordinators > 1 and config.autoscale is not None:
        raise ConfigError("coordinators: an autoscaled local cluster has one", field="coordinators")
    for seen in each_coordinator(config)[1:]:
        front = seen.coordinator
        claim_port(front.host, front.grpc_port)
        if front.http_port is not None:
            claim_port(front.host, front.http_port, "http_port")


async def run_cluster(
    config: ClusterConfig,
    log_dir: Path | None,
    *,
    command: CommandFactory | None = None,
    policy: RestartPolicy | None = None,
) -> bool:
    """Runs until a stop signal. True if it took a second signal, which kills instead of draining."""
    from splitserve.cli.cluster_display import ClusterDisplay
    from splitserve.client import AsyncClient
    from splitserve.cluster_setup import (
        cluster_probe,
        cluster_target,
        cluster_token,
        coordinator_specs,
        operator_security,
        parts_target,
        splitserve_command,
        worker_spec,
        worker_specs,
    )
    from splitserve.core_layout import available_cores
    from splitserve.local_cluster import ClusterTimes, LocalCluster
    from splitserve.part_security import TOKEN_VARIABLE
    from splitserve.placement import cuda_devices, make_inventory

    token = cluster_token(config)
    security = operator_security(config, token)
    scaling = _scaling(config, security)
    if scaling is not None:
        config = scaling.config
    start = command or splitserve_command
    devices = cuda_devices(config.engine.kind, config.engine.device)
    workers = config.prefill + config.decode if scaling is None else scaling.most_workers
    inventory = make_inventory(available_cores(), workers, pin_cores=config.pin_cores, devices=devices)
    make = partial(worker_spec, config, start) if scaling is None else partial(scaling.worker_spec, start)
    specs = [*coordinator_specs(config, start), *worker_specs(config, inventory, make)]
    target = cluster_target(config)
    times = ClusterTimes(ready_s=config.ready_timeout_s, drain_s=config.coordinator.drain_s)
    with ClusterDisplay(specs, _ready_line(config, target), log_dir) as display:
        async with AsyncClient(parts_target(config), security=security) as client:
            probe = cluster_probe(client, config)
            shared = {TOKEN_VARIABLE: token}
            cluster = LocalCluster(specs, probe, display, times=times, policy=policy, environment=shared)
            _steer_by_signals(cluster, display.message)
            if scaling is None:
                await cluster.run()
            else:
                await scaling.run(cluster, inventory, make)
    return cluster.was_killed


def _scaling(config: ClusterConfig, security: PartSecurity) -> LocalScaling | None:
    if config.autoscale is None:
        return None
    from autoscaler.local_scaling import LocalScaling
    from splitserve.logs import configure_logging

    configure_logging("autoscaler")
    return LocalScaling.of(config, config.autoscale, security)


def _provide_model(config: ClusterConfig) -> None:
    """Makes sure that the model can be loaded before anything starts; fetches an embedded one."""
    from splitserve.models import EMBEDDED, resolve_model

    if config.engine.kind == "simulated":
        return
    try:
        resolve_model(config.model)
    except NotFoundError:
        if config.model not in EMBEDDED:
            raise
        from splitserve.cli.model import fetch_with_progress

        print(f"{config.model} is not on this machine yet; fetching it", file=sys.stderr, flush=True)
        fetch_with_progress(config.model)


def _steer_by_signals(cluster: LocalCluster, tell: Callable[[str], None]) -> None:
    """The first signal drains, a second one kills."""
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping:
            tell("killing all processes")
            cluster.kill_now()
            return
        stopping = True
        tell("draining; once more to kill at once")
        cluster.request_stop()

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup: the cluster is to outlive its terminal
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _ready_line(config: ClusterConfig, target: str) -> str:
    elsewhere = "" if target == options.DEFAULT_TARGET else f" --target {target}"
    if config.tls is not None:
        elsewhere += f" --tls {config.tls}"
    pools = f"{config.prefill} prefill + {config.decode} decode"
    line = f'splitserve ready on {target} · {{model}} · {pools} · try: splitserve generate "Hello"{elsewhere}'
    from splitserve.cluster_setup import openai_url

    url = openai_url(config)
    return line if url is None else f"{line}\nOpenAI-compatible API: {url}"
