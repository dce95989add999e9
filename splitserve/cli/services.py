"""`splitserve coordinator`, the three kinds of worker, `autoscaler`: run one service in this process.

`splitserve autoscaler explain` is here too, because it follows the name of its service.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import typer

from splitserve.cluster.compute_threads import set_compute_threads, set_spins
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.config.autoscaler import AutoscalerConfig
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig

PANEL = "Services, one process each"

Kind = Literal["prefill", "decode", "worker"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    # Imported here: listing the commands needs no settings.
    from splitserve.cli.client.scaling_explain import explain_scaling
    from splitserve.config.autoscaler import AutoscalerConfig
    from splitserve.config.command_line import EPILOG, command
    from splitserve.config.coordinator import CoordinatorConfig
    from splitserve.config.worker import WorkerConfig

    def add(name: str, summary: str, function: Callable[..., None]) -> None:
        app.command(name, help=summary, epilog=EPILOG, rich_help_panel=PANEL)(function)

    def worker(kind: Kind) -> Callable[..., None]:
        named = {"worker_id": _default_worker_id(kind)}
        return command(WorkerConfig, lambda settings: _run_worker(kind, settings), defaults=named)

    front = command(CoordinatorConfig, _run_coordinator)
    add("coordinator", "Run the coordinator: the front door that routes requests to workers.", front)
    add("worker", "Run a neutral worker: prompts and tokens with one engine, leaning live.", worker("worker"))
    add("prefill-worker", "Run a prefill worker: prompts in, KV out.", worker("prefill"))
    add("decode-worker", "Run a decode worker: KV in, tokens out.", worker("decode"))
    summary = "Run the autoscaler: as many workers in each pool as its policy asks for."
    scaling = typer.Typer(
        invoke_without_command=True, help=summary, epilog=EPILOG, subcommand_metavar="[explain ...]"
    )
    scaling.callback()(_unless_followed(command(AutoscalerConfig, _run_autoscaler)))
    scaling.command("explain")(explain_scaling)
    app.add_typer(scaling, name="autoscaler", rich_help_panel=PANEL)


def _unless_followed(service: Callable[..., None]) -> Callable[..., None]:
    """The service's command, which does nothing where another command follows it."""

    def run(ctx: typer.Context, **given: Any) -> None:
        if ctx.invoked_subcommand is None:
            service(**given)

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *inspect.signature(service).parameters.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _run_autoscaler(settings: AutoscalerConfig) -> None:
    _configure_logging("autoscaler")
    if settings.models is not None:
        from autoscaler.sharing.shared_service import serve_models

        _run(serve_models(settings))
        return
    from autoscaler.service import serve

    _run(serve(settings))


def _run_coordinator(settings: CoordinatorConfig) -> None:
    _configure_logging("coordinator")
    _tell_of_idle(settings.idle_settings())
    from coordinator.service import serve

    _run(serve(settings))


def _run_worker(kind: Kind, settings: WorkerConfig) -> None:
    _configure_logging(settings.worker_id)
    _tell_of_idle(settings.idle_settings(is_neutral=kind == "worker"))
    from splitserve.gpus.worker_gpus import claim_gpus

    _claim_cores(settings)
    settings = claim_gpus(settings)
    from splitserve.runtime.library_ahead import load_ahead
    from splitserve.runtime.process import without_collector

    if settings.engine.kind == "torch":
        load_ahead()
    with without_collector():
        serve = _serve_of(kind, settings.trades_prefixes)
    _run(serve(settings))


def _serve_of(kind: Kind, trades: bool) -> Callable[[WorkerConfig], Coroutine[Any, Any, None]]:
    """What serves a kind of worker. Imported late: torch reads the number of threads on import."""
    if kind == "worker":
        from neutral_worker.service import serve

        return serve
    if trades:
        from neutral_worker.trading_worker import serve_decode, serve_prefill

        return serve_prefill if kind == "prefill" else serve_decode
    if kind == "prefill":
        from prefill_worker.service import serve as serve_pinned_prefill

        return serve_pinned_prefill
    from decode_worker.service import serve as serve_pinned_decode

    return serve_pinned_decode


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
        set_compute_threads(threads)
    if settings.engine.kind != "vllm":  # whose kernels were not measured so
        set_spins(pinned=bool(settings.cpus))


def _default_worker_id(kind: Kind) -> str:
    """KIND-HOSTNAME-PID, cut to the length of a worker id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
    return f"{kind}-{host}-{os.getpid()}"


def _tell_of_idle(settings: Mapping[str, str]) -> None:
    from splitserve.logs import log_event

    for setting, why in settings.items():
        log_event("settings.no_effect", level=logging.WARNING, setting=setting, why=why)


def _configure_logging(part: str) -> None:
    from splitserve.logs import configure_logging

    configure_logging(part)


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
    """Runs a service, and ends the process with its exit code at once: closing the event loop would wait for its tasks
    and for the threads of `asyncio.to_thread`, the interpreter's end for other threads and the hooks of libraries."""
    from splitserve.cli.main import explain
    from splitserve.runtime.process import leave_at_once

    try:
        await _logged(service)
    except Exception as error:
        leave_at_once(explain(error))
    leave_at_once()


async def _logged(service: Coroutine[Any, Any, None]) -> None:
    """The log keeps the traceback of an unexpected error; the terminal gets one line."""
    from splitserve.logs import log_exception
    from splitserve.rpc.status import known_error

    try:
        await service
    except Exception as error:
        if known_error(error) is None:
            log_exception("service.failed", error)
        raise
