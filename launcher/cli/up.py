"""`splitserve up`: starts and supervises a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launcher.cli.options import DEFAULT_TARGET
from splitserve.addresses import MAX_PORT, claim_port
from splitserve.errors import ConfigError, FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from launcher.cluster.child_process import RestartPolicy
    from launcher.cluster.local_scaling import LocalScaling
    from launcher.cluster.process_specs import CommandFactory
    from launcher.cluster.supervisor import LocalCluster
    from splitserve.config.cluster import ClusterConfig
    from splitserve.rpc.credentials import ClusterCredentials

EXIT_KILLED = 130
CHOICES = 10
"""How often free ports are chosen until they fit together."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    # Imported here: listing the commands needs no settings.
    from splitserve.config.cluster import ClusterConfig
    from splitserve.config.command_line import EPILOG, command, optional

    log_dir = typer.Option(metavar="DIR", help="Write each process's log to a file there.")
    summary = "Start a local cluster and keep it running until Ctrl-C, which drains it."
    function = command(ClusterConfig, up, beside=[optional("log_dir", Path, log_dir)])
    app.command("up", help=summary, epilog=EPILOG)(function)


def up(settings: ClusterConfig, log_dir: Path | None = None) -> None:
    """Runs a cluster with these settings. Removes the parts' variables from the environment.

    Raises UnavailableError or FailedPreconditionError for a port that is taken, ConfigError without the model.
    """
    from launcher.cluster.process_specs import check_workers

    check_workers(settings)
    settings.check_own_security()
    for setting, why in settings.idle_settings().items():
        print(f"warning: {setting} has no effect {why}", file=sys.stderr, flush=True)
    _leave_settings_to_options()
    settings = _claim_ports(settings)
    _provide_model(settings)
    killed = asyncio.run(run_cluster(settings, log_dir))
    if killed:
        raise typer.Exit(EXIT_KILLED)


def _claim_ports(settings: ClusterConfig) -> ClusterConfig:
    """The settings with free ports in place of 0. Raises ConfigError, and FailedPreconditionError naming one in use."""
    if settings.coordinators > 1 and settings.autoscale is not None:
        raise ConfigError("coordinators: an autoscaled local cluster has one", field="coordinators")
    front = settings.coordinator
    if settings.tls is not None and front.cluster_port is None:
        ports = {"cluster_port": front.grpc_port + 1 if front.grpc_port else 0}
        settings = settings.model_copy(update={"coordinator": front.model_copy(update=ports)})
    _check_ports(settings)
    if 0 in (front.grpc_port, front.http_port, settings.coordinator.cluster_port):
        # Ports that were chosen may be each other's, or not have the next ones free.
        for _ in range(CHOICES - 1):
            with suppress(ConfigError, FailedPreconditionError):
                return _with_free_ports(settings)
    return _with_free_ports(settings)


def _with_free_ports(settings: ClusterConfig) -> ClusterConfig:
    front = settings.coordinator
    ports = {"grpc_port": claim_port(front.host, front.grpc_port)}
    if front.http_port is not None:
        ports["http_port"] = claim_port(front.host, front.http_port, "http_port")
    if settings.tls is not None:
        assert front.cluster_port is not None
        ports["cluster_port"] = claim_port(front.host, front.cluster_port)
    settings = settings.model_copy(update={"coordinator": front.model_copy(update=ports)})
    _claim_further_ports(settings)
    return settings


def _leave_settings_to_options() -> None:
    """The parts are configured by their command lines, which omit defaults: a variable must not override those."""
    from splitserve.config.command_line import settings_of
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig

    for kind in (CoordinatorConfig, WorkerConfig):
        for setting in settings_of(kind):
            os.environ.pop(setting.variable, None)


def _claim_further_ports(config: ClusterConfig) -> None:
    """Checks the ports of further coordinators. Raises UnavailableError naming one in use."""
    from launcher.cluster.process_specs import each_coordinator

    _check_ports(config)
    for seen in each_coordinator(config)[1:]:
        front = seen.coordinator
        claim_port(front.host, front.grpc_port)
        if front.http_port is not None:
            claim_port(front.host, front.http_port, "http_port")


def _check_ports(config: ClusterConfig) -> None:
    """Checks that the coordinators' consecutive ports exist and are different ones. Raises ConfigError."""
    from launcher.cluster.process_specs import each_coordinator

    owners: dict[int, str] = {}
    for number, seen in enumerate(each_coordinator(config)):
        for setting in ("grpc_port", "cluster_port", "http_port", "metrics_port"):
            port = getattr(seen.coordinator, setting)
            if not port or (setting == "cluster_port" and config.tls is None):
                continue
            owner = f"{setting} of coordinator {number}"
            if port > MAX_PORT:
                field = "coordinators" if number else f"coordinator.{setting}"
                message = f"{field}: {owner} would be {port}; ports are at most {MAX_PORT}"
                raise ConfigError(message, field=field)
            if port in owners:
                message = f"coordinator.{setting}: port {port} is that of {owners[port]} and of {owner}"
                raise ConfigError(message, field=f"coordinator.{setting}")
            owners[port] = owner


async def run_cluster(
    config: ClusterConfig,
    log_dir: Path | None,
    *,
    command: CommandFactory | None = None,
    policy: RestartPolicy | None = None,
) -> bool:
    """Runs until a stop signal. True if it took a second signal, which kills instead of draining."""
    from launcher.cli.cluster_display import ClusterDisplay
    from launcher.cluster.placement import available_cores, machine_gpus, make_inventory
    from launcher.cluster.process_specs import (
        cluster_probe,
        cluster_token,
        coordinator_specs,
        operator_security,
        parts_target,
        splitserve_command,
        worker_count,
        worker_spec,
        worker_specs,
    )
    from launcher.cluster.supervisor import ClusterTimes, LocalCluster
    from splitserve.client import AsyncClient
    from splitserve.rpc.credentials import TOKEN_VARIABLE

    token = cluster_token(config)
    security = operator_security(config, token)
    scaling = _scaling(config, security)
    if scaling is not None:
        config = scaling.config
    start = command or splitserve_command
    gpus = machine_gpus(config.engine.kind, config.engine.device, config.replicas_per_gpu)
    workers = worker_count(config) if scaling is None else scaling.most_workers
    inventory = make_inventory(available_cores(), workers, pin_cores=config.pin_cores, gpus=gpus)
    with ExitStack() as stack:
        given = (config, start) if scaling is None else (start,)
        make = partial(worker_spec if scaling is None else scaling.worker_spec, *given)
        seats = {} if scaling is None else scaling.seats
        specs = [*coordinator_specs(config, start), *worker_specs(config, inventory, make, seats)]
        line = _ready_line(config)
        display = stack.enter_context(ClusterDisplay(specs, line, log_dir))
        async with AsyncClient(parts_target(config), security=security) as client:
            probe, shared = cluster_probe(client, config), {TOKEN_VARIABLE: token}
            times = ClusterTimes(ready_s=config.ready_timeout_s, drain_s=config.coordinator.drain_s)
            cluster = LocalCluster(specs, probe, display, times=times, policy=policy, environment=shared)
            _steer_by_signals(cluster, display.message)
            if scaling is None:
                await cluster.run()
            else:
                await scaling.run(cluster, inventory, make)
    return cluster.was_killed


def _scaling(config: ClusterConfig, security: ClusterCredentials) -> LocalScaling | None:
    if config.autoscale is None:
        return None
    from launcher.cluster.local_scaling import LocalScaling
    from splitserve.logs import configure_logging

    configure_logging("autoscaler")
    return LocalScaling.of(config, config.autoscale, security)


def _provide_model(config: ClusterConfig) -> None:
    """Checks before the start that the model can be loaded; fetches an embedded one."""
    from splitserve.models.sources import EMBEDDED, checked_model

    if config.engine.kind == "simulated":
        return
    try:
        checked_model(config.model)
    except NotFoundError:
        if config.model not in EMBEDDED:
            raise
        from launcher.cli.model import fetch_with_progress

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


def _ready_line(config: ClusterConfig) -> str:
    from launcher.cluster.process_specs import cluster_target, openai_url

    target = cluster_target(config)
    elsewhere = "" if target == DEFAULT_TARGET else f" --target {target}"
    if config.tls is not None:
        elsewhere += f" --tls {config.tls}"
    pools = f"{config.prefill} prefill + {config.decode} decode"
    if config.workers is not None:
        pools = f"{config.workers} workers of role both"
    line = f'splitserve ready on {target} · {{model}} · {pools} · try: splitserve generate "Hello"{elsewhere}'
    url = openai_url(config)
    return line if url is None else f"{line}\nOpenAI-compatible API: {url}"
