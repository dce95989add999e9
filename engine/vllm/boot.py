"""Starts vLLM in processes of its own. Only this folder depends on vLLM's internals."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.model_runner import ModelFacts
from engine.kv_cache.block_pool import KvEventLog
from engine.model.adapter import AdapterFiles, check_fits_base, folder_shapes, read_adapters
from engine.vllm.options import (
    FIELD,
    checked_options,
    own_arguments,
    rank_count,
    ranks_of,
    read_options,
    reason_of,
)
from engine.vllm.processes import VllmProcesses
from engine.vllm.transport import VllmTransport
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import DRAM, VRAM, KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, SplitserveError, UnavailableError, UnsupportedModelError

if TYPE_CHECKING:
    from engine.vllm.adapters import LoadedAdapters
    from engine.vllm.prefix_events import PrefixEvents

SUPPORTED = ("0.32",)
"""The minor versions of vLLM that the tests ran with. Its connector interface is marked experimental."""
CONNECTOR = "engine.vllm.connector", "SplitserveConnector"
FIRST_TOKENS = "engine.vllm.first_token:FirstTokens"
FIRST_TOKENS_V2 = "engine.vllm.first_token_v2:FirstTokensV2"
EVENTS_SOCKET = "events"


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """vLLM with its model loaded and its KV cache allocated."""

    engine: Any
    """A `vllm.v1.engine.llm_engine.LLMEngine` whose engine core runs in a process of its own."""
    processes: VllmProcesses
    transport: VllmTransport
    facts: ModelFacts
    events: PrefixEvents
    adapters: LoadedAdapters | None = None
    """None: the worker has no adapters."""
    _latest: list[Any] = field(default_factory=list)
    """vLLM's `SchedulerStats` of its latest step, if there was one."""

    @property
    def core(self) -> Any:
        """The client of vLLM's engine core."""
        return self.engine.engine_core

    def used_share(self) -> float:
        """The share of the KV cache that requests use, as vLLM said last."""
        return float(self._latest[0].kv_cache_usage) if self._latest else 0.0

    def running_requests(self) -> int:
        """The requests that vLLM's scheduler computes, as it said last."""
        return int(self._latest[0].num_running_reqs) if self._latest else 0

    def listen(self, take: Callable[[Any], None], wake: Callable[[], None]) -> None:
        """Starts threads that pass vLLM's messages with outputs to `take`, and call `wake` when the transport has
        something to poll. The message that says that vLLM has ended is an exception, raised where it is taken."""
        self.transport.listen(wake)
        threading.Thread(target=self._read, args=(take,), name="vllm-outputs", daemon=True).start()

    def close(self) -> None:
        """Ends vLLM."""
        self.core.shutdown()
        self.processes.close()

    def _read(self, take: Callable[[Any], None]) -> None:
        while True:
            try:
                message = self.core.get_output()
            except Exception as error:
                take(error)
                return
            if message.scheduler_stats is not None:
                self._latest[:] = [message.scheduler_stats]
            if message.outputs:
                take(message)


def start_vllm(config: EngineConfig, folder: Path, transport: str) -> StartedVllm:
    """Loads the model in `folder`; takes seconds. Call it on the engine thread.

    Raises UnavailableError (VLLM_MISSING) without a supported vLLM, ConfigError for options that are refused,
    UnsupportedModelError for a model whose KV cannot be handed over or that vLLM does not load.
    """
    ranks = rank_count(config.engine_args)  # before vLLM's import, which takes seconds
    if transport != "nixl":
        raise ConfigError(f"transport: vLLM moves KV by nixl, not {transport}", field="transport")
    threads = config.threads or len(os.sched_getaffinity(0))
    prepare_environment(max(1, threads // ranks))
    version, on_cpu = _require_vllm()
    own = own_arguments(config, str(folder), on_cpu=on_cpu)
    args = read_options(own, checked_options(config.engine_args))
    if ranks_of(args) != ranks:
        message = f"{FIELD}: write --tensor-parallel-size and --pipeline-parallel-size in full"
        raise ConfigError(message, field=FIELD)
    adapters = read_adapters(config.adapters)
    if adapters:
        base = folder_shapes(folder)
        for files in adapters.values():
            check_fits_base(files, base)
    if on_cpu and ranks == 1:  # its default is a process more, which spins while it is idle
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        args.distributed_executor_backend = UniProcExecutor
    processes = VllmProcesses(ranks)
    try:
        with processes.temporary_files():
            engine = _load(args, processes, adapters, on_cpu)
        processes.join()
        return _started(engine, processes, folder, version, adapters, on_cpu)
    except BaseException as error:
        processes.close()
        # vLLM raises whatever it is: also AttributeError and ImportError for options, Exception for a lost rank.
        if isinstance(error, SplitserveError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(f"vLLM cannot serve {folder}: {reason_of(error)}") from error


def prepare_environment(threads: int) -> None:
    """Sets what vLLM and OpenMP read when they are loaded. The first one overrides what is set, the others do not."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _require_vllm() -> tuple[str, bool]:
    """vLLM's version, and whether it computes on cpu."""
    disabled = logging.root.manager.disable
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        message = f"engine vllm: vLLM is not installed, see docs/guides/models-and-engines.md ({error})"
        raise UnavailableError(message, reason="VLLM_MISSING") from None
    finally:
        logging.disable(disabled)
    version = str(vllm.__version__)
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        message = f"engine vllm: vLLM {version} is not supported, only {SUPPORTED[0]} to {SUPPORTED[-1]}"
        raise UnavailableError(message, reason="VLLM_MISSING")
    return version, bool(current_platform.is_cpu())


def _load(args: Any, processes: VllmProcesses, adapters: Mapping[str, AdapterFiles], on_cpu: bool) -> Any:
    """vLLM's engine for its `EngineArgs`."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine.vllm.connector import SOCKET_FIELD

    module, name = CONNECTOR
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        engine_id=str(uuid.uuid4()),
        kv_buffer_device="cpu" if on_cpu else "cuda",
        kv_connector_extra_config={SOCKET_FIELD: processes.socket_path, "num_threads": 0},
    )
    args.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=_events_address(processes)
    )
    args.structured_outputs_config.backend = "guidance"
    if adapters:
        from engine.vllm.adapters import check_supported, keep_slot_empty

        check_supported(list(adapters.values()), args.max_lora_rank)
        if on_cpu:
            keep_slot_empty(args)
    # Which model runner it is decides which logits processors it takes.
    args.logits_processors = [FIRST_TOKENS]
    settled = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if settled.model_config.is_hybrid or settled.model_config.is_attention_free:
        raise UnsupportedModelError(
            "engine vllm: a model with recurrent state cannot be handed over with its first token"
        )
    if settled.use_v2_model_runner:
        args.logits_processors = [FIRST_TOKENS_V2]
    elif settled.speculative_config is not None:
        message = "vLLM's first model runner takes no first token of a handoff beside speculation"
        raise ConfigError(f"{FIELD}: {message}", field=FIELD)
    return LLMEngine.from_engine_args(args)


def _events_address(processes: VllmProcesses) -> str:
    return f"ipc://{processes.folder / EVENTS_SOCKET}"


def _started(
    engine: Any,
    processes: VllmProcesses,
    folder: Path,
    version: str,
    adapters: Mapping[str, AdapterFiles],
    on_cpu: bool,
) -> StartedVllm:
    # Imported here: it needs vLLM, or torch.
    from engine.vllm.model_files import DTYPE_NAMES, fingerprint_of, tied_tensors
    from engine.vllm.prefix_events import PrefixEvents

    model, vllm = engine.model_config, engine.vllm_config
    config, first = model.hf_config, processes.ranks[0]
    kv_dtype = vllm.cache_config.cache_dtype
    layout = KvLayout(
        model_fingerprint=fingerprint_of(folder, config.to_dict(), tied_tensors(config)),
        dtype=DTYPE_NAMES[model.dtype] if kv_dtype == "auto" else "uint8",
        block_size_tokens=vllm.cache_config.block_size,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        axis_order=f"{first.axis_order},{kv_dtype}",
        engine_version=f"vllm-{version}",
    )
    memory = KvMemoryRegion(
        base_address=first.base_address,
        num_blocks=vllm.cache_config.num_gpu_blocks,
        layout=layout,
        memory_kind=DRAM if on_cpu else VRAM,
        device_index=first.device_index,
    )
    parallel = vllm.parallel_config
    transport = VllmTransport(
        processes, vllm.kv_transfer_config.engine_id, parallel.tensor_parallel_size, memory
    )
    events = PrefixEvents(KvEventLog())
    events.follow(_events_address(processes))
    loaded = None
    if adapters:
        from engine.vllm.adapters import LoadedAdapters

        loaded = LoadedAdapters(adapters, engine)
    facts = replace(_facts(model), adapters={name: files.adapter for name, files in adapters.items()})
    return StartedVllm(engine, processes, transport, facts, events, loaded)


def _facts(model: Any) -> ModelFacts:
    generation = model.try_get_generation_config() or {}
    end = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    tokens = [] if end is None else [end] if isinstance(end, int) else end
    return ModelFacts(int(model.max_model_len), int(model.get_vocab_size()), frozenset(map(int, tokens)))
