"""Builds a worker's engine from its settings, and registers its memory with the transport, all on one thread."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from engine.core.engine import Engine
from engine.core.engine_core import EngineCore
from engine.core.model_runner import ModelRunner, warm_up
from engine.core.step_stats import StepMeter, StepWork
from engine.core.types import ModelFacts
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.free_memory import require_free_memory
from engine.kv_cache.kv_dtype import refuse_int8_kv
from engine.model.adapter import read_adapters
from engine.runner.simulated_runner import SimulatedRunner
from engine.runner.structured_output import GrammarCompiler
from engine.speculation.drafter import Drafter
from engine.speculation.settings import check_drafts, make_drafter, warm_up_drafts
from engine.tiers.build import check_tiers, make_tiers
from engine.tiers.kv_tiers import KvTiers
from engine.worker.kept_vocabulary import load_vocabulary
from engine.worker.start_phases import StartClock, StartPhases
from engine.worker.warm_up.decode_steps import measure_decode_steps
from engine.worker.warm_up.idle_work import IdleWork
from kv_transfer.layout import NO_QUANTIZATION, SAME
from kv_transfer.transports.buffered import BufferedTransport
from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.faulty import FaultyTransport
from kv_transfer.transports.sharded import ShardedTransport
from kv_transfer.transports.transport import VRAM, TransferEndpoint, Transport
from kv_transfer.weights.manifest import WeightsReader
from kv_transfer.weights.taker import WeightsSource
from kv_transfer.wire_format import KvWire, PlainWire, check_wire_dtype
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, UnsupportedModelError
from splitserve.host_facts import host_id
from splitserve.logs import log_event
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import localize_model, read_ahead, resolve_model
from splitserve.runtime.process import without_collector
from splitserve.v1 import generation_pb2, registry_pb2

SIMULATED = "simulated"
VLLM = "vllm"
PROGRESS_STEP = 0.05
"""Minimum share of the weights between two progress events."""


@dataclass(frozen=True, slots=True)
class ServedAs:
    """The model's public name, and where the coordinator finds its tokenizer."""

    name: str
    tokenizer_source: str


class EngineSleep(ABC):
    """What an engine gives up while its worker sleeps. Used on the engine thread, while no block has an owner."""

    @abstractmethod
    def give_up(self) -> None:
        """Gives the memory up; the transport is closed."""

    @abstractmethod
    def take_back(self) -> None:
        """Takes it back. Raises SplitserveError where it is not to be had."""


@dataclass(frozen=True, slots=True)
class KvSleep(EngineSleep):
    """Of our own engines: the memory of KV. The prefix cache is emptied, so coordinators forget what it held; on cpu
    weights, compiled steps and what lower tiers hold stay. See `ModelRunner.give_up_kv` for what goes on a device."""

    pool: BlockPool
    runners: Sequence[ModelRunner]
    drafter: Drafter | None

    def give_up(self) -> None:
        """See `EngineSleep`."""
        self.pool.forget()
        if self.drafter is not None:
            self.drafter.forget_kv()
        for runner in self.runners:
            runner.give_up_kv()

    def take_back(self) -> None:
        """See `EngineSleep`. Raises ConfigError, with nothing taken, unless there is main memory for all of it: each
        part is populated behind this call, so that each one would find free what the others are about to take. A device
        raises torch.OutOfMemoryError where it runs out."""
        require_free_memory(sum(runner.given_up_bytes for runner in self.runners))
        for runner in self.runners:
            runner.take_kv_back()


_Loaded: TypeAlias = tuple[ModelRunner, ModelRunner | None, ServedAs]
OpenTransport = Callable[[], tuple[Transport, TransferEndpoint]]
"""Opens a transport, as a new agent, and registers the memory that peers write to."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. All but `grammars` and the plain data belong to the engine thread."""

    core: Engine
    facts: ModelFacts
    wire: KvWire
    grammars: GrammarCompiler
    """For the gRPC services, on the event loop."""
    transport: Transport
    endpoint: TransferEndpoint
    served: ServedAs
    config: WorkerConfig
    work: StepWork | None = None
    """What a step asks of the device; None if unknown."""
    tiers: KvTiers | None = None
    """What is below the KV blocks, if anything is."""
    start: StartPhases | None = None
    """How long the process took until these were built."""
    sleep: EngineSleep | None = None
    """None: this engine cannot sleep."""
    weights: WeightsReader | None = None
    """For workers that start; None: it has none to give."""
    open_transport: OpenTransport | None = None
    """As `transport` was opened; where the engine can sleep."""
    idle: IdleWork | None = None

    def reopened(self) -> EngineParts:
        """These with a new transport in place of the closed one."""
        assert self.open_transport is not None, "this engine cannot sleep"
        transport, endpoint = self.open_transport()
        return replace(self, transport=transport, endpoint=endpoint)

    def registration(
        self,
        epoch: int,
        address: str,
        pool: registry_pb2.Pool.ValueType,
        *,
        neutral: bool,
        trades_prefixes: bool,
        asleep: bool,
    ) -> registry_pb2.RegisterRequest:
        """What the worker says of itself: of its boot `epoch`, which leans to `pool`, at "host:port"."""
        config, facts, engine = self.config, self.facts, self.config.engine
        return registry_pb2.RegisterRequest(
            worker_id=config.worker_id,
            epoch=epoch,
            pool=pool,
            address=address,
            model=registry_pb2.ServedModel(
                name=self.served.name,
                tokenizer_source=self.served.tokenizer_source,
                context_tokens=min(facts.context_tokens, engine.context_tokens or facts.context_tokens),
                vocabulary_size=facts.vocabulary_size,
                eos_token_ids=sorted(facts.eos_token_ids),
                adapters=[generation_pb2.AdapterRef(**one._asdict()) for one in facts.adapters.values()],
            ),
            endpoint=self.endpoint.to_proto(),
            max_step_tokens=self.core.max_step_tokens,
            max_running_requests=engine.max_running_requests,
            standby=config.standby,
            experimental=engine.kind == "torch" and self.endpoint.memory.memory_kind == VRAM,
            paces_prompts=self.core.paces_prompts,
            neutral=neutral,
            trades_prefixes=trades_prefixes,
            start=self.start.to_proto() if self.start is not None else None,
            replica_class=config.replica_class,
            carries_calls=True,
            sleeping=asleep,
            gives_weights=self.weights is not None and config.give_weights_gb_per_s is not None,
        )


def build_engine(
    config: WorkerConfig, *, decodes: bool = True, peer: WeightsSource | None = None
) -> EngineParts:
    """Loads the weights, allocates the KV blocks and registers their memory. Takes as long as loading the weights.

    The first load of a worker that `decodes` has a fit of decode steps; others need no drafts. `peer`: where weights
    come from, if not from files.

    Raises ConfigError for a missing model and for settings that contradict each other, NotFoundError for an embedded
    model that is not fetched, UnsupportedModelError for one that the engine refuses.
    """
    check_tiers(config.engine)
    check_drafts(config.engine)
    if not decodes:
        without = config.engine.model_copy(update={"speculation": "off", "draft_model": None})
        config = config.model_copy(update={"engine": without})
    clock = StartClock()
    parts = _vllm(config, clock) if config.engine.kind == VLLM else _own(config, decodes, clock, peer)
    return replace(parts, start=clock.ready())


def _own(config: WorkerConfig, decodes: bool, clock: StartClock, peer: WeightsSource | None) -> EngineParts:
    if config.engine.engine_args:
        raise ConfigError("engine.engine_args: only engine vllm takes them", field="engine.engine_args")
    if config.engine.adapters and config.engine.kind != SIMULATED:
        raise ConfigError("engine.adapters: only engine vllm takes them", field="engine.adapters")
    adapters = {name: files.adapter for name, files in read_adapters(config.engine.adapters).items()}
    runner, draft_runner, served = (
        _simulated(config, clock) if config.engine.kind == SIMULATED else _torch(config, clock, peer)
    )
    tokenizer, grammars = load_vocabulary(served.tokenizer_source, runner.facts)
    if config.engine.kind != SIMULATED:
        grammars.prepare()
    prompt_tokens = warm_up(runner, config.engine.max_step_tokens, drafts=warm_up_drafts(config.engine))
    meter = StepMeter()
    if decodes:
        measure_decode_steps(runner, meter.fit, prompt_tokens, config.engine.max_running_requests)
    if runner.pool_memory.memory_kind == VRAM:
        _require_transfer(config.transport, runner.pool_memory.device_index)

    def open_transport() -> tuple[Transport, TransferEndpoint]:
        transport = _polled(_with_faults(make_transport(config.transport), config), runner)
        return transport, replace(transport.register_memory(runner.wire.memory), host_id=host_id())

    transport, endpoint = open_transport()
    drafter = make_drafter(config.engine, draft_runner, runner.facts.vocabulary_size, runner.take_cores)
    tiers = make_tiers(config.engine, runner.pool_memory, config.wire_dtype)
    core = EngineCore(runner, config.engine, tokenizer, drafter=drafter, meter=meter, tiers=tiers)
    runners = [each for each in (runner, draft_runner) if each is not None]
    # Lower tiers have the address of a device's blocks, which a sleep may change.
    on_device = runner.pool_memory.memory_kind == VRAM
    can_sleep = not on_device or (config.engine.device_sleep == "on" and tiers is None)
    return EngineParts(
        core,
        replace(runner.facts, adapters=adapters),
        runner.wire,
        grammars,
        transport,
        endpoint,
        served,
        config,
        runner.work,
        tiers,
        weights=runner.named_weights,
        sleep=KvSleep(core.pool, runners, drafter) if can_sleep else None,
        open_transport=open_transport,
        idle=IdleWork(runners, core.pool, core.max_step_tokens),
    )


def _require_transfer(transport: str, device_index: int) -> None:
    # Imported here, so that simulated workers start without torch.
    import torch

    from engine.runner.self_test.device_checks import require_transfer

    require_transfer(transport, torch.device("cuda", device_index))


def _polled(transport: Transport, runner: ModelRunner) -> Transport:
    """For a device's memory transports have no progress thread: they are polled while a step is computed."""
    if runner.pool_memory.memory_kind != VRAM:
        return transport
    buffered = BufferedTransport(transport)
    runner.poll_while_computing(buffered.progress)
    return buffered


def _with_faults(transport: Transport, config: WorkerConfig) -> Transport:
    if config.faults is None:
        return transport
    planned = config.faults.model_dump(exclude_defaults=True)
    log_event("worker.faults_on", level=logging.WARNING, worker_id=config.worker_id, planned=planned)
    return FaultyTransport(transport, config.faults)


def _simulated(config: WorkerConfig, clock: StartClock) -> _Loaded:
    refuse_int8_kv(config.engine, "engine simulated")
    clock.imported()
    runner = SimulatedRunner(config.engine)
    check_wire_dtype(config.wire_dtype, runner.layout.dtype)
    return runner, None, ServedAs(config.served_model_name or SIMULATED, SIMULATED)


def _torch(config: WorkerConfig, clock: StartClock, peer: WeightsSource | None) -> _Loaded:
    source = resolve_model(config.model)
    if peer is None:
        read_ahead(source)
    # Imported here, so that simulated workers start without torch, whose import is a lean one if it is the first.
    with without_collector():
        import engine.model.lean_torch  # noqa: F401
        from engine.runner.draft_runner import load_draft_model
        from engine.runner.torch_runner import build_torch_runner

    clock.imported()
    logged = -1.0

    def progress(fraction: float) -> None:
        nonlocal logged
        if fraction - logged >= PROGRESS_STEP or fraction >= 1.0 > logged:
            logged = fraction
            log_event("worker.loading", worker_id=config.worker_id, fraction=round(fraction, 3))

    draft = load_draft_model(config.engine, source)
    beside = draft.block_bytes if draft is not None else 0
    runner = build_torch_runner(
        config.engine, source, progress, config.wire_dtype, clock.loaded, beside, peer
    )
    draft_runner = draft.runner(runner.num_blocks) if draft is not None else None
    name = config.served_model_name or source.short_name
    return runner, draft_runner, ServedAs(name, source.tokenizer_source)


def _vllm(config: WorkerConfig, clock: StartClock) -> EngineParts:
    if config.engine.speculation != "off":
        message = "engine.speculation: engine vllm takes none, it is given the first token of a handoff"
        raise ConfigError(message, field="engine.speculation")
    # Imported here, because few installations have vLLM.
    from engine.vllm.boot import start_vllm

    if config.wire_dtype != SAME:
        raise ConfigError("wire_dtype: engine vllm sends KV as it is", field="wire_dtype")
    if config.engine.quantization != NO_QUANTIZATION:
        message = "engine.quantization: with engine vllm the checkpoint says how it is quantized"
        raise ConfigError(message, field="engine.quantization")
    refuse_int8_kv(config.engine, "engine vllm")
    source = localize_model(resolve_model(config.model))
    if source.gguf_file:
        raise UnsupportedModelError(f"model {config.model}: engine vllm reads no GGUF files")
    clock.imported()
    vllm = start_vllm(config.engine, Path(source.path), config.transport)
    clock.loaded()
    from engine.vllm.vllm_engine import VllmEngine

    tokenizer = load_tokenizer(source.tokenizer_source)
    grammars = GrammarCompiler(tokenizer, vllm.facts)
    grammars.prepare()
    core = VllmEngine(vllm, config.engine, tokenizer)
    wire = PlainWire(lambda: vllm.memory, vllm.read_blocks, vllm.converter)
    own, ranks = make_transport(config.transport), vllm.ranks
    sharded = ShardedTransport(own, ranks.transports, ranks.endpoints) if ranks else ShardedTransport(own)
    transport = _with_faults(sharded, config)
    endpoint = replace(transport.register_memory(wire.memory), host_id=host_id())
    served = ServedAs(config.served_model_name or source.short_name, source.tokenizer_source)
    return EngineParts(core, vllm.facts, wire, grammars, transport, endpoint, served, config)
