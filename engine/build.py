"""Builds one worker's engine from its settings: runner, tokenizer, core and transport, on one thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from engine.core import EngineCore
from engine.grammar import GrammarCompiler
from engine.runner import ModelRunner
from engine.simulated_runner import SimulatedRunner
from engine.warm_up import warm_up
from kv_transfer.faulty_transport import FaultyTransport
from kv_transfer.select import make_transport
from kv_transfer.transport import TransferEndpoint, Transport
from kv_transfer.wire import check_wire_dtype
from splitserve.config import WorkerConfig
from splitserve.hf_tokenizer import load_tokenizer
from splitserve.host_facts import host_id
from splitserve.logs import log_event
from splitserve.models import resolve_model

SIMULATED = "simulated"
PROGRESS_STEP = 0.05
"""Least share of the weights between two progress events."""


@dataclass(frozen=True, slots=True)
class ServedAs:
    """The name that clients use, and where the coordinator finds the tokenizer."""

    name: str
    tokenizer_source: str


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that belongs to the engine thread."""

    runner: ModelRunner
    core: EngineCore
    grammars: GrammarCompiler
    """For the services; of all parts the one that does not belong to the thread."""
    transport: Transport
    endpoint: TransferEndpoint
    served: ServedAs
    config: WorkerConfig


def build_engine(config: WorkerConfig) -> EngineParts:
    """Loads weights, allocates and registers the pool. Takes as long as the weights take to load.

    Raises NotFoundError for a missing model, UnsupportedModelError for one the engine refuses, ConfigError
    for settings that do not go together.
    """
    runner, served = _simulated(config) if config.engine.kind == SIMULATED else _torch(config)
    tokenizer = load_tokenizer(served.tokenizer_source)
    grammars = GrammarCompiler(tokenizer, runner.facts)
    if config.engine.kind != SIMULATED:
        grammars.prepare()
    warm_up(runner, config.engine.max_step_tokens)
    transport = _transport(config)
    endpoint = replace(transport.register_pool(runner.wire.memory), host_id=host_id())
    core = EngineCore(runner, config.engine, tokenizer)
    return EngineParts(runner, core, grammars, transport, endpoint, served, config)


def _transport(config: WorkerConfig) -> Transport:
    transport = make_transport(config.transport)
    if config.faults is None:
        return transport
    planned = config.faults.model_dump(exclude_defaults=True)
    log_event("worker.faults_on", level=logging.WARNING, worker_id=config.worker_id, planned=planned)
    return FaultyTransport(transport, config.faults)


def _simulated(config: WorkerConfig) -> tuple[ModelRunner, ServedAs]:
    runner = SimulatedRunner(config.engine)
    check_wire_dtype(config.wire_dtype, runner.layout.dtype)
    return runner, ServedAs(config.served_model_name or SIMULATED, SIMULATED)


def _torch(config: WorkerConfig) -> tuple[ModelRunner, ServedAs]:
    # Imported here so that simulated workers start without torch.
    from engine.torch_runner import build_torch_runner

    logged = -1.0

    def progress(fraction: float) -> None:
        nonlocal logged
        if fraction - logged >= PROGRESS_STEP or fraction >= 1.0 > logged:
            logged = fraction
            log_event("worker.loading", worker_id=config.worker_id, fraction=round(fraction, 3))

    source = resolve_model(config.model)
    runner = build_torch_runner(config.engine, source, progress, config.wire_dtype)
    return runner, ServedAs(config.served_model_name or source.short_name, source.tokenizer_source)
