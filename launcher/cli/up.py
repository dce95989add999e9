"""`splitserve up`: starts and supervises a local cluster until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launcher.cli.options import DEFAULT_TARGET
from splitserve.addresses import MAX_PORT, claim_port
from splitserve.errors import ConfigError, FailedPreconditionError, NotFoundError
from splitserve.extras import require_worker

if TYPE_CHECKING:
    from launcher.cluster.child_process import RestartPolicy
    from launcher.cluster.local_scaling import LocalScaling
    from launcher.cluster.process_specs import CommandFactory
    from launcher.cluster.supervisor import LocalCluster
    from splitserve.config.cluster import ClusterConfig
    from splitserve.rpc.credentials import ClusterCredentials

EXIT_KILLED = 130
CHOICES = 10
"""How many times free ports are chosen, at most, until they fit together."""
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
    """Runs a cluster with these settings. Removes the variables of its parts' settings from the environment.

    Raises UnavailableError or FailedPreconditionError for a port that is taken, ConfigError without the model,
    MissingExtraError without what its workers need.
    """
    from launcher.cluster.placement import with_default_engine
    from launcher.cluster.process_specs import check_workers

    named = settings.engine.kind
    settings = with_default_engine(settings)
    if settings.engine.kind != named:
        why = f"this machine has GPUs and vLLM (--engine {named} for splitserve's own)"
        print(f"engine {settings.engine.kind}: {why}", file=sys.stderr, flush=True)
    require_worker(settings.engine.kind, settings.transport)
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
        # Two chosen ports may be the same, or the ports after a chosen one may be taken.
        for _ in range(CHOICES - 1):
            with suppress(ConfigError, FailedPreconditionError):
                return _with_free_ports(settings)
    return _with_free_ports(settings)


def _with_free_ports(settings: ClusterConfig) -> ClusterConfig:
    """The settings with free ports in place of 0, after a check of all coordinators' ports. Raises ConfigError, and
    FailedPreconditionError naming a port that is taken."""
    from launcher.cluster.process_specs import each_coordinator

    front = settings.coordinator
    ports = {"grpc_port": claim_port(front.host, front.grpc_port)}
    if front.http_port is not None:
        ports["http_port"] = claim_port(front.host, front.http_port, "http_port")
    if settings.tls is not None:
        assert front.cluster_port is not None
        ports["cluster_port"] = claim_port(front.host, front.cluster_port)
    settings = settings.model_copy(update={"coordinator": front.model_copy(update=ports)})
    _check_ports(settings)
    for numbered in each_coordinator(settings)[1:]:
        claim_port(numbered.coordinator.host, numbered.coordinator.grpc_port)
        if numbered.coordinator.http_port is not None:
            claim_port(numbered.coordinator.host, numbered.coordinator.http_port, "http_port")
    return settings


def _leave_settings_to_options() -> None:
    """Removes the variables of the parts' settings from the environment. Command lines configure the parts and omit
    defaults, which a variable would override."""
    from splitserve.config.command_line import settings_of
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig

    for kind in (CoordinatorConfig, WorkerConfig):
        for setting in settings_of(kind):
            os.environ.pop(setting.variable, None)


def _check_ports(config: ClusterConfig) -> None:
    """Checks that the coordinators' consecutive ports are valid and all different. Raises ConfigError."""
    from launcher.cluster.process_specs import each_coordinator

    owners: dict[int, str] = {}
    for number, numbered in enumerate(each_coordinator(config)):
        for setting in ("grpc_port", "cluster_port", "http_port", "metrics_port"):
            port = getattr(numbered.coordinator, setting)
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
    """Runs the cluster until a stop signal. True if it took a second signal, which kills instead of draining."""
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
    make = partial(worker_spec, config, start) if scaling is None else partial(scaling.worker_spec, start)
    seats = {} if scaling is None else scaling.seats
    specs = [*coordinator_specs(config, start), *worker_specs(config, inventory, make, seats)]
    with ClusterDisplay(specs, _ready_line(config), log_dir) as display:
        async with AsyncClient(parts_target(config), security=security) as client:
            probe, shared = cluster_probe(client, config), {TOKEN_VARIABLE: token}
            times = ClusterTimes(ready_s=config.ready_timeout_s, drain_s=config.coordinator.drain_s)
            cluster = LocalCluster(specs, probe, display, times=times, policy=policy, environment=shared)
            _stop_on_signals(cluster, display.message)
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


def _stop_on_signals(cluster: LocalCluster, show: Callable[[str], None]) -> None:
    """Drains the cluster on the first stop signal and kills it on a second one."""
    signalled = False

    def on_signal() -> None:
        nonlocal signalled
        if signalled:
            show("killing all processes")
            cluster.kill_now()
            return
        signalled = True
        show("draining; once more to kill at once")
        cluster.request_stop()

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup: the cluster is to outlive its terminal
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _ready_line(config: ClusterConfig) -> str:
    from launcher.cluster.process_specs import cluster_target, openai_url

    target = cluster_target(config)
    client_options = "" if target == DEFAULT_TARGET else f" --target {target}"
    if config.tls is not None:
        client_options += f" --tls {config.tls}"
    pools = f"{config.prefill} prefill + {config.decode} decode"
    if config.workers is not None:
        pools = f"{config.workers} worker{'s' * (config.workers > 1)} of role both"
    line = f'splitserve ready on {target} · {{model}} · {pools} · try: splitserve generate "Hello"{client_options}'
    url = openai_url(config)
    return line if url is None else f"{line}\nOpenAI-compatible API: {url}"
