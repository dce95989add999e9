"""Builds a worker's engine from its settings, and registers its memory with the transport, all on one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from engine.core.engine import Engine
from engine.core.engine_core import EngineCore
from engine.core.model_runner import ModelFacts, ModelRunner, warm_up
from engine.model.adapter import read_adapters
from engine.runner.simulated_runner import SimulatedRunner
from engine.runner.structured_output import GrammarCompiler
from kv_transfer.handoff.checksums import KvMemory
from kv_transfer.transports import make_transport
from kv_transfer.transports.regions import VRAM
from kv_transfer.transports.transport import TransferEndpoint, Transport
from splitserve.config.engine import SIMULATED
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, UnsupportedModelError
from splitserve.host_facts import host_id
from splitserve.logs import log_event
from splitserve.models.hf_tokenizer import ByteTokenizer, tokenizer_of
from splitserve.models.sources import checked_model, local_files
from splitserve.models.tokenizer import Tokenizer
from splitserve.roles import ROLE_NUMBERS, RoleName
from splitserve.v1 import generation_pb2, kv_transfer_pb2, registry_pb2

Post = Callable[[Callable[[Engine], object]], None]
"""Runs a function on the engine thread, between two steps."""
if TYPE_CHECKING:
    from engine.vllm.sampling import VllmGrammars

VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class ServedAs:
    """The model's public name, and where the coordinator finds its tokenizer."""

    name: str
    tokenizer_source: str


_Loaded: TypeAlias = tuple[ModelRunner, ServedAs, Tokenizer]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. All except `grammars` and the plain data belong to the engine thread."""

    core: Engine
    facts: ModelFacts
    kv_memory: KvMemory
    grammars: GrammarCompiler | VllmGrammars
    """For the gRPC services, on the event loop."""
    transport: Transport
    endpoint: TransferEndpoint
    served: ServedAs
    config: WorkerConfig
    start: StartPhases | None = None
    """How long the process took until these were built."""

    def registration(
        self, epoch: int, address: str, role: RoleName, *, changes_role: bool
    ) -> registry_pb2.RegisterRequest:
        """The message with which the worker registers: its boot `epoch`, and its address "host:port"."""
        config, facts, engine = self.config, self.facts, self.config.engine
        endpoint = self.endpoint.to_proto()
        if facts.pooling:
            endpoint = kv_transfer_pb2.TransferEndpoint(
                agent_id=endpoint.agent_id, host_id=endpoint.host_id, layout=endpoint.layout
            )
        return registry_pb2.RegisterRequest(
            worker_id=config.worker_id,
            epoch=epoch,
            role=ROLE_NUMBERS[role],
            changes_role=changes_role,
            address=address,
            model=registry_pb2.ServedModel(
                name=self.served.name,
                tokenizer_source=self.served.tokenizer_source,
                context_tokens=min(facts.context_tokens, engine.context_tokens or facts.context_tokens),
                vocabulary_size=facts.vocabulary_size,
                eos_token_ids=sorted(facts.eos_token_ids),
                adapters=[
                    generation_pb2.AdapterRef(**adapter._asdict()) for adapter in facts.adapters.values()
                ],
                pooling=facts.pooling,
            ),
            endpoint=endpoint,
            max_step_tokens=self.core.max_step_tokens,
            max_running_requests=engine.max_running_requests,
            standby=config.standby,
            experimental=engine.kind == "torch" and self.endpoint.memory.memory_kind == VRAM,
            start=self.start.to_proto() if self.start is not None else None,
        )


def build_engine(config: WorkerConfig, post: Post) -> EngineParts:
    """Loads the weights, allocates the KV blocks and registers their memory. Takes as long as loading the weights.

    Raises ConfigError for a missing model and for settings that contradict each other, NotFoundError for an embedded
    model that is not fetched, UnsupportedModelError for one that the engine refuses.
    """
    clock = StartClock()
    parts = _vllm(config, clock, post) if config.engine.kind == VLLM else _own(config, clock)
    return replace(parts, start=clock.ready())


def _own(config: WorkerConfig, clock: StartClock) -> EngineParts:
    if config.engine.engine_args:
        raise ConfigError("engine.engine_args: only engine vllm takes them", field="engine.engine_args")
    if config.engine.adapters and config.engine.kind != SIMULATED:
        raise ConfigError("engine.adapters: only engine vllm takes them", field="engine.adapters")
    adapters = {name: files.adapter for name, files in read_adapters(config.engine.adapters).items()}
    load = _simulated if config.engine.kind == SIMULATED else _torch
    runner, served, tokenizer = load(config, clock)
    grammars = GrammarCompiler(tokenizer, runner.facts)
    if config.engine.kind != SIMULATED:
        grammars.prepare()
    warm_up(runner, config.engine.max_step_tokens)
    transport = make_transport(config.transport)
    endpoint = replace(transport.register_memory(runner.kv_memory.region), host_id=host_id())
    core = EngineCore(runner, config.engine, tokenizer)
    facts = replace(runner.facts, adapters=adapters)
    return EngineParts(core, facts, runner.kv_memory, grammars, transport, endpoint, served, config)


def _simulated(config: WorkerConfig, clock: StartClock) -> _Loaded:
    clock.imported()
    runner = SimulatedRunner(config.engine)
    return runner, ServedAs(config.served_model_name or SIMULATED, SIMULATED), ByteTokenizer()


def _torch(config: WorkerConfig, clock: StartClock) -> _Loaded:
    # A worker with damaged files ends here, before torch is imported and the weights are read, which takes time.
    source = checked_model(config.model)
    tokenizer = tokenizer_of(local_files(source, weights=False))
    # Neither progress bars nor remarks of `transformers`, which reads this on import, belong into the log.
    os.environ.update(TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    # Imported here, so that simulated workers start without torch.
    from engine.runner.torch_runner import build_torch_runner

    clock.imported()
    log_event("worker.loading", worker_id=config.worker_id)
    runner = build_torch_runner(config.engine, source, clock.loaded)
    name = config.served_model_name or source.short_name
    return runner, ServedAs(name, source.tokenizer_source), tokenizer


def _vllm(config: WorkerConfig, clock: StartClock, post: Post) -> EngineParts:
    # Imported here, because few installations have vLLM.
    from engine.vllm.boot import start_vllm

    if config.verify_kv not in ("auto", "off"):
        raise ConfigError("verify_kv: vLLM's blocks are not read, so it must be off", field="verify_kv")
    source = local_files(checked_model(config.model))
    if source.gguf_file:
        raise UnsupportedModelError(f"model {config.model}: engine vllm reads no GGUF files")
    tokenizer = tokenizer_of(source)
    clock.imported()
    log_event("worker.loading", worker_id=config.worker_id)
    vllm = start_vllm(config.engine, Path(source.path), config.transport)
    if vllm.facts.pooling and config.role != "both":
        message = f"role: a pooling model needs role both, not {config.role} (a local cluster: --workers N)"
        raise ConfigError(message, field="role")
    clock.loaded()
    from engine.vllm.sampling import VllmGrammars
    from engine.vllm.vllm_engine import VllmEngine

    core = VllmEngine(vllm, config.engine, tokenizer)
    core.start(post)
    endpoint = replace(vllm.transport.endpoint, host_id=host_id())
    kv_memory = KvMemory(endpoint.memory, lambda block_ids: [])
    served = ServedAs(config.served_model_name or source.short_name, source.tokenizer_source)
    config = config.model_copy(update={"verify_kv": "off"})
    return EngineParts(core, vllm.facts, kv_memory, VllmGrammars(), vllm.transport, endpoint, served, config)


_STAT = Path("/proc/self/stat")
_AFTER_NAME = 19
"""Index of the start time among the fields of `stat` that follow the command's name; see proc_pid_stat(5)."""


def process_age_s() -> float:
    """Time since this process was made, in seconds, to 0.01.

    A program that was executed in place of another is as old as that.
    """
    fields = _STAT.read_text().rpartition(")")[2].split()
    ticks = int(fields[_AFTER_NAME])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True, slots=True)
class StartPhases:
    """The phases of a start, in seconds; each begins where the one before ends."""

    process_s: float
    """From the start of the process until its tokenizer is loaded and its code imported."""
    weights_s: float
    """Until the weights are read, checked and packed."""
    warm_up_s: float
    """Until the engine is ready: memory for KV, kernels, captured steps, and the first steps."""

    @property
    def total_s(self) -> float:
        """From the start of the process until the engine is ready."""
        return self.process_s + self.weights_s + self.warm_up_s

    def fields(self) -> dict[str, float]:
        """The seconds of each phase, to milliseconds."""
        seconds = {"process": self.process_s, "weights": self.weights_s, "warm_up": self.warm_up_s}
        return {phase: round(took_s, 3) for phase, took_s in seconds.items()}

    def to_proto(self) -> registry_pb2.StartPhases:
        """As a registration has it."""
        return registry_pb2.StartPhases(
            process_seconds=self.process_s, weights_seconds=self.weights_s, warm_up_seconds=self.warm_up_s
        )


class StartClock:
    """Takes the time between the phases of this process's start. Used on one thread at a time."""

    def __init__(self, age_s: Callable[[], float] = process_age_s) -> None:
        """`age_s`: the time since the process began, in seconds."""
        self._age_s = age_s
        self._imported_s = self._loaded_s = 0.0

    def imported(self) -> None:
        """All code is imported, and the weights are read next."""
        self._imported_s = self._loaded_s = self._age_s()

    def loaded(self) -> None:
        """The weights are in memory."""
        self._loaded_s = self._age_s()
        log_event("worker.loaded", seconds=round(self._loaded_s - self._imported_s, 3))

    def ready(self) -> StartPhases:
        """The engine is ready."""
        ready_s = self._age_s()
        imported_s, loaded_s = self._imported_s or ready_s, self._loaded_s or ready_s
        return StartPhases(imported_s, loaded_s - imported_s, ready_s - loaded_s)
