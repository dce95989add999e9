"""`splitserve coordinator`, the workers, `autoscaler`: run one service in this process.

`splitserve autoscaler explain` is here too, because it follows the name of its service.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer

from splitserve.errors import ConfigError
from splitserve.extras import require_worker
from splitserve.logs import configure_logging, log_event, log_exception

if TYPE_CHECKING:
    from splitserve.config.autoscaler import AutoscalerConfig
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig


Kind = Literal["prefill", "decode", "worker"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    # Imported here: listing the commands needs no settings.
    from launcher.cli.client.scaling_explain import explain_scaling
    from splitserve.config.autoscaler import AutoscalerConfig
    from splitserve.config.command_line import EPILOG, command
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig

    def add(name: str, summary: str, function: Callable[..., None]) -> None:
        app.command(name, help=summary, epilog=EPILOG)(function)

    def worker(kind: Kind) -> Callable[..., None]:
        # KIND-HOSTNAME-PID, cut to the length of a worker id.
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
        defaults = {"worker_id": f"{kind}-{host}-{os.getpid()}"}
        if kind != "worker":
            defaults["role"] = kind
        return command(WorkerConfig, _run_worker, defaults=defaults)

    coordinator = command(CoordinatorConfig, _run_coordinator)
    summary = "Run the coordinator: the front door that routes requests to workers."
    add("coordinator", summary, coordinator)
    add("worker", "Run a worker of any role: prompts, tokens or both, as its role says.", worker("worker"))
    add("prefill-worker", "Run a worker with role prefill: prompts in, KV out.", worker("prefill"))
    add("decode-worker", "Run a worker with role decode: KV in, tokens out.", worker("decode"))
    summary = "Run the autoscaler: as many workers in each pool as its policy asks for."
    scaling = typer.Typer(
        invoke_without_command=True, help=summary, epilog=EPILOG, subcommand_metavar="[explain ...]"
    )
    scaling.callback()(_unless_followed(command(AutoscalerConfig, _run_autoscaler)))
    scaling.command("explain")(explain_scaling)
    app.add_typer(scaling, name="autoscaler")


def _unless_followed(service: Callable[..., None]) -> Callable[..., None]:
    """The service's command; it does nothing where a subcommand follows it."""

    def run(ctx: typer.Context, **given: Any) -> None:
        if ctx.invoked_subcommand is None:
            service(**given)

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *inspect.signature(service).parameters.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _run_autoscaler(settings: AutoscalerConfig) -> None:
    configure_logging("autoscaler")
    from autoscaler.service import serve

    _run(serve(settings))


def _run_coordinator(settings: CoordinatorConfig) -> None:
    configure_logging("coordinator")
    _warn_of_idle_settings(settings)
    from coordinator.service import serve

    _run(serve(settings))


def _run_worker(settings: WorkerConfig) -> None:
    require_worker(settings.engine.kind, settings.transport)
    configure_logging(settings.worker_id)
    _warn_of_idle_settings(settings)
    from splitserve.gpus.worker_gpus import claim_gpus

    _claim_cores(settings)
    _run(_serve_worker(claim_gpus(settings)))


async def _serve_worker(settings: WorkerConfig) -> None:
    """Runs a worker until SIGTERM or SIGINT. It has the services of both pools, so that its role can change, unless it
    has only one end of the transfer."""
    # Imported here, after `_claim_cores`: torch reads the number of threads on import.
    from decode_worker.service import DecodeService
    from prefill_worker.service import PrefillService
    from worker.process import WorkerProcess
    from worker.role import has_both_ends

    services = [PrefillService, DecodeService]
    if not has_both_ends(settings):
        services = [PrefillService]
    await WorkerProcess(settings, services).run()


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
        # OpenMP and MKL read these variables when they are loaded.
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))


def _warn_of_idle_settings(settings: CoordinatorConfig | WorkerConfig) -> None:
    for setting, why in settings.idle_settings().items():
        log_event("settings.no_effect", level=logging.WARNING, setting=setting, why=why)


def _run(service: Coroutine[Any, Any, None]) -> None:
    import faulthandler
    import signal

    import uvloop

    from splitserve.runtime.process import raise_file_limit

    raise_file_limit()
    # kill -USR2 shows what every thread is doing.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    uvloop.run(leaving(service))


async def leaving(service: Coroutine[Any, Any, None]) -> NoReturn:
    """Runs a service, then ends the process with its exit code at once. Closing the event loop would wait for its tasks
    and for the threads of `asyncio.to_thread`; ending the interpreter would wait for other threads and for the exit
    hooks of libraries."""
    from launcher.cli.main import explain
    from splitserve.rpc.status import known_error
    from splitserve.runtime.process import leave_at_once

    try:
        await service
    except Exception as error:
        if known_error(error) is None:  # the terminal gets one line, the log the traceback
            log_exception("service.failed", error)
        leave_at_once(explain(error))
    leave_at_once()
