"""Starts vLLM in processes of its own. No other folder depends on vLLM's internals."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.model_runner import ModelFacts
from engine.kv_cache.block_pool import KvEventLog
from engine.model.adapter import AdapterFiles, check_fits_base, folder_shapes, read_adapters
from engine.vllm.options import FIELD, rank_count, read_options, reason_of
from engine.vllm.processes import VllmProcesses
from engine.vllm.transport import VllmTransport
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import DRAM, VRAM, KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import (
    ConfigError,
    MissingExtraError,
    SplitserveError,
    UnavailableError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from engine.vllm.adapters import LoadedAdapters
    from engine.vllm.prefix_events import PrefixEvents

SUPPORTED = ("0.32",)
"""The minor versions of vLLM with which the tests ran. vLLM marks its connector interface as experimental."""
FIRST_TOKENS_V2 = "engine.vllm.first_token:FirstTokensV2"
OFFLOADING = {"cuda": {"kv_connector": "SimpleCPUOffloadConnector"}}
"""vLLM's connector that copies blocks to main memory, by device. It holds references to blocks while it copies them.
vLLM's `OffloadingConnector` frees them, and ends its copies in the first step in which vLLM uses the blocks again: a
peer may have written into them before."""
MAX_OFFLOADED_GIB = 2**16
FIRST_TOKEN_RANK = "engine.vllm.first_token.FirstTokenRank"


@dataclass(slots=True)
class StartedVllm:
    """vLLM after it has loaded the model and allocated the KV cache."""

    engine: Any
    """A `vllm.v1.engine.llm_engine.LLMEngine`. Its engine core runs in another process."""
    processes: VllmProcesses
    transport: VllmTransport
    facts: ModelFacts
    events: PrefixEvents
    adapters: LoadedAdapters | None
    """None if the worker has no adapters."""
    task: str = "generate"
    """vLLM's task of all requests: `generate`, `embed` or `classify`."""
    stats: Any = None
    """vLLM's `SchedulerStats` of its latest step; None before the first step. A reader thread replaces it."""

    def listen(self, take: Callable[[Any], None], wake: Callable[[], None]) -> None:
        """Starts threads that read from vLLM.

        They call `take` with each `EngineCoreOutputs` that has outputs, with an exception once vLLM has ended, and
        `wake` when the transport has something to poll.
        """
        self.processes.listen(wake)
        threading.Thread(target=self._read, args=(take,), name="vllm-outputs", daemon=True).start()

    def close(self) -> None:
        """Ends vLLM."""
        self.engine.engine_core.shutdown()
        self.processes.close()

    def _read(self, take: Callable[[Any], None]) -> None:
        while True:
            try:
                message = self.engine.engine_core.get_output()
            except Exception as error:
                take(error)
                return
            self.stats = message.scheduler_stats or self.stats
            if message.outputs:
                take(message)


def start_vllm(config: EngineConfig, folder: Path, transport: str) -> StartedVllm:
    """Starts vLLM with the model in `folder`, in seconds to minutes. Call it on the engine thread.

    Raises UnavailableError without a supported vLLM, ConfigError for a refused setting or option,
    UnsupportedModelError for a model that vLLM cannot load or whose KV cannot be handed over.
    """
    ranks = rank_count(config.engine_args)
    if transport != "nixl":
        raise ConfigError(f"transport: vLLM moves KV by nixl, not {transport}", field="transport")
    threads = config.threads or len(os.sched_getaffinity(0))
    prepare_environment(max(1, threads // ranks))
    on_cpu = _import_vllm()
    args = read_options(config, str(folder), on_cpu=on_cpu)
    if args.tensor_parallel_size * args.pipeline_parallel_size != ranks:
        message = f"{FIELD}: write --tensor-parallel-size and --pipeline-parallel-size in full"
        raise ConfigError(message, field=FIELD)
    adapters = read_adapters(config.adapters)
    if on_cpu and args.enforce_eager:
        # vLLM would still compile single functions, at the first request for log-probabilities: ten seconds of C++.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # By default vLLM starts a process for a single rank too, which spins while it is idle.
    if on_cpu and ranks == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        args.distributed_executor_backend = UniProcExecutor
    processes = VllmProcesses(ranks)
    try:
        with processes.temporary_files():
            model = args.create_model_config()
            if model.runner_type == "pooling":
                from engine.vllm.pooling import load_pooling
                from engine.vllm.prefix_events import PrefixEvents

                engine, pooling, facts, task = load_pooling(args, config, model, folder, processes)
                unread = PrefixEvents(KvEventLog())
                return StartedVllm(engine, processes, pooling, facts, unread, None, task)
            engine = _load(args, processes, folder, adapters, on_cpu)
        processes.join()
        return _started(engine, processes, folder, adapters)
    except BaseException as error:
        processes.close()
        # vLLM raises exceptions of any class: AttributeError and ImportError for options, Exception for a lost rank.
        if isinstance(error, SplitserveError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(f"vLLM cannot serve {folder}: {reason_of(error)}") from error


def prepare_environment(threads: int) -> None:
    """Sets the variables that vLLM and OpenMP read when they are loaded. All but the first can be set by users."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _import_vllm() -> bool:
    """Imports vLLM; returns whether it computes on CPU. Raises MissingExtraError, and UnavailableError for
    an unsupported version."""
    disabled = logging.root.manager.disable
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingExtraError("engine vllm", "vllm", error) from None
    finally:
        logging.disable(disabled)  # the import may change it for the whole process
    if ".".join(vllm.__version__.split(".")[:2]) not in SUPPORTED:
        message = f"engine vllm: vLLM {vllm.__version__} is not supported, only {', '.join(SUPPORTED)}"
        raise UnavailableError(message, reason="VLLM_UNSUPPORTED")
    return bool(current_platform.is_cpu())


def _load(
    args: Any, processes: VllmProcesses, folder: Path, adapters: Mapping[str, AdapterFiles], on_cpu: bool
) -> Any:
    """Returns vLLM's `LLMEngine` for its `EngineArgs`."""
    from vllm.config import KVEventsConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    args.kv_transfer_config = _transfer_config(args.kv_offloading_size, processes.socket_path, on_cpu)
    args.kv_offloading_size = None  # vLLM would put its own connector in the place of ours
    args.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=processes.events_address
    )
    args.structured_outputs_config.backend = "guidance"
    if adapters:
        from engine.vllm.adapters import check_supported, keep_slot_empty

        base = folder_shapes(folder)
        for files in adapters.values():
            check_fits_base(files, base)
            check_supported(files, args.max_lora_rank)
        if on_cpu:
            keep_slot_empty(args)
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    model = config.model_config
    if model.is_hybrid or model.is_attention_free:
        raise UnsupportedModelError(
            "engine vllm: a model with recurrent state cannot be handed over with its first token"
        )
    # vLLM chooses one of its two model runners. Beside speculation the first one takes no logits processor from its
    # settings, so its ranks add it.
    if config.use_v2_model_runner:
        model.logits_processors = [FIRST_TOKENS_V2]
    else:
        config.parallel_config.worker_extension_cls = FIRST_TOKEN_RANK
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
    if not config.use_v2_model_runner:
        engine.collective_rpc("take_first_tokens")
    return engine


def _transfer_config(offloaded_gib: float | None, socket_path: str, on_cpu: bool) -> Any:
    """Returns vLLM's `KVTransferConfig`. `offloaded_gib`: GiB of main memory for blocks that leave the device."""
    from vllm.config import KVTransferConfig

    from engine.vllm.connector import SOCKET_FIELD, SplitserveConnector

    device = "cpu" if on_cpu else "cuda"
    both: dict[str, Any] = {"kv_role": "kv_both", "kv_buffer_device": device}
    extra: dict[str, Any] = {SOCKET_FIELD: socket_path, "num_threads": 0}
    handoff = both | {
        "kv_connector": SplitserveConnector.__name__,
        "kv_connector_module_path": SplitserveConnector.__module__,
        "kv_connector_extra_config": extra,
    }
    if offloaded_gib is None:
        return KVTransferConfig(engine_id=str(uuid.uuid4()), **handoff)
    why = (
        ""
        if 0 < offloaded_gib <= MAX_OFFLOADED_GIB
        else f"must be above 0 and at most {MAX_OFFLOADED_GIB} GiB"
    )
    if device not in OFFLOADING:
        why = f"is for GPUs: on {device} the KV is in main memory already"
    if why:
        raise ConfigError(f"{FIELD}: --kv-offloading-size {why}", field=FIELD)
    extra = {"cpu_bytes_to_use": int(offloaded_gib * 2**30)}
    offloading = both | OFFLOADING[device] | {"kv_connector_extra_config": extra}
    extra = {"connectors": [handoff, offloading]}
    multi = both | {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    return KVTransferConfig(engine_id=str(uuid.uuid4()), **multi)


def _started(
    engine: Any, processes: VllmProcesses, folder: Path, adapters: Mapping[str, AdapterFiles]
) -> StartedVllm:
    import vllm

    from engine.model.loaded_model import files_fingerprint
    from engine.vllm.prefix_events import PrefixEvents

    config, model, first_rank = engine.vllm_config, engine.model_config, processes.ranks[0]
    kv_dtype = config.cache_config.cache_dtype
    layout = KvLayout(
        model_fingerprint=files_fingerprint(folder, model.hf_config),
        dtype=str(model.dtype).removeprefix("torch.") if kv_dtype == "auto" else "uint8",
        block_size_tokens=config.cache_config.block_size,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        axis_order=f"{first_rank.axis_order},{kv_dtype}",
        engine_version=f"vllm-{vllm.__version__}",
    )
    memory = KvMemoryRegion(
        base_address=first_rank.base_address,
        num_blocks=config.cache_config.num_gpu_blocks,
        layout=layout,
        memory_kind=DRAM if config.kv_transfer_config.kv_buffer_device == "cpu" else VRAM,
        device_index=first_rank.device_index,
    )
    tensor_parallel_size = config.parallel_config.tensor_parallel_size
    transport = VllmTransport(processes, config.kv_transfer_config.engine_id, tensor_parallel_size, memory)
    events = PrefixEvents(KvEventLog())
    events.follow(processes.events_address)
    loaded = None
    if adapters:
        from engine.vllm.adapters import LoadedAdapters

        loaded = LoadedAdapters(adapters, engine)
    return StartedVllm(engine, processes, transport, _facts(model, adapters), events, loaded)


def _facts(model: Any, adapters: Mapping[str, AdapterFiles]) -> ModelFacts:
    generation = model.try_get_generation_config() or {}
    eos = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    eos_token_ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return ModelFacts(
        context_tokens=int(model.max_model_len),
        vocabulary_size=int(model.get_vocab_size()),
        eos_token_ids=frozenset(map(int, eos_token_ids)),
        adapters={name: files.adapter for name, files in adapters.items()},
    )
