"""Starts vLLM in this process. Only this module and those that vLLM loads depend on vLLM's internals."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.model_runner import ModelFacts
from engine.kv_cache.block_pool import KvEventLog
from engine.model.adapter import AdapterFiles, check_fits_base, folder_shapes, read_adapters
from engine.vllm.bridge import VllmBridge, close_bridge, open_bridge
from engine.vllm.options import (
    FIELD,
    checked_options,
    own_arguments,
    read_options,
    reason_of,
    tensor_parallel_size,
)
from kv_transfer.handoff.checksums import BlockReader
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, SplitserveError, UnavailableError, UnsupportedModelError

if TYPE_CHECKING:
    from engine.vllm.adapters import LoadedAdapters
    from engine.vllm.ranks.rank_group import RankGroup

SUPPORTED = ("0.30", "0.31", "0.32")
"""The minor versions of vLLM that the tests ran with. Its connector interface is marked experimental."""

_HERE, _RANKS = "engine.vllm.plugins", "engine.vllm.ranks.rank_plugins"
PLUGINS = f"{_HERE}:SplitserveConnector", f"{_HERE}:SamplingProcessor"
RANK_PLUGINS = f"{_RANKS}:RankedConnector", f"{_RANKS}:RankSamplingProcessor"
"""The connector and the logits processor that vLLM loads, with one rank and with several."""


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """vLLM with its model loaded and its KV cache allocated."""

    engine: Any
    """A `vllm.v1.engine.llm_engine.LLMEngine`, in this process."""
    bridge: VllmBridge
    facts: ModelFacts
    memory: KvMemoryRegion
    events: KvEventLog
    read_blocks: BlockReader
    """What the checksums of blocks are made from."""
    ranks: RankGroup | None = None
    """The processes that hold the KV; None: this one does."""
    adapters: LoadedAdapters | None = None
    """None: the worker has no adapters."""

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.engine_core.engine_core.scheduler

    def free_blocks(self) -> int:
        """Blocks that nobody uses; prefix-cached ones among them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def block_table(self, vllm_id: str) -> list[int]:
        """The blocks of a request that has any."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(vllm_id)[0])

    def close(self) -> None:
        """Ends vLLM and forgets the bridge."""
        self.engine.engine_core.shutdown()
        if self.ranks is not None:
            self.ranks.close()
        close_bridge()


def start_vllm(config: EngineConfig, folder: Path, transport: str) -> StartedVllm:
    """Loads the model in `folder`; takes seconds. Call it on the engine thread, once a process.

    `transport`: by which ranks send KV. Raises UnavailableError (VLLM_MISSING) without a supported vLLM, ConfigError
    for options that are refused, UnsupportedModelError for a model whose KV cannot be handed over or that vLLM does not
    load.
    """
    size = tensor_parallel_size(config.engine_args)  # before vLLM's import, which takes seconds
    if size > 1 and transport != "nixl":
        raise ConfigError(f"transport: with several ranks it is nixl, not {transport}", field="transport")
    threads = config.threads or len(os.sched_getaffinity(0))
    prepare_environment(max(1, threads // size))
    version, on_cpu = _require_vllm()
    own = own_arguments(config, str(folder), on_cpu=on_cpu)
    args = read_options(own, checked_options(config.engine_args))
    if args.tensor_parallel_size != size:
        raise ConfigError(f"{FIELD}: write --tensor-parallel-size in full", field=FIELD)
    adapters = read_adapters(config.adapters)
    if adapters:
        base = folder_shapes(folder)
        for files in adapters.values():
            check_fits_base(files, base)
    import torch

    torch.set_num_threads(threads)  # before vLLM forbids it
    bridge = open_bridge()
    ranks: RankGroup | None = None
    try:
        if size == 1:
            return _started(_load(args, None, adapters, on_cpu), bridge, folder, version, adapters)
        from engine.vllm.ranks.rank_group import RankGroup

        ranks = RankGroup(size, transport)
        with ranks.temporary_files():
            engine = _load(args, ranks.connector_config, adapters, on_cpu)
        ranks.join(bridge, int(engine.model_config.get_vocab_size()))
        return _started(engine, bridge, folder, version, adapters, ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
        close_bridge()
        # vLLM raises whatever it is: also AttributeError and ImportError for options, Exception for a lost rank.
        if isinstance(error, SplitserveError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModelError(f"vLLM cannot serve {folder}: {reason_of(error)}") from error


def prepare_environment(threads: int) -> None:
    """Sets what vLLM and OpenMP read when they are loaded. The first three override what is set, the others do not."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the default with Triton; it takes other logits processors
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


def _load(
    args: Any, connector_config: Mapping[str, Any] | None, adapters: Mapping[str, AdapterFiles], on_cpu: bool
) -> Any:
    """vLLM's engine for its `EngineArgs`; each of several ranks is told `connector_config`."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    connector, processor = PLUGINS if connector_config is None else RANK_PLUGINS
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=connector.partition(":")[2],
        kv_connector_module_path=connector.partition(":")[0],
        kv_role="kv_both",
        kv_connector_extra_config=dict(connector_config or {}),
    )
    args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    args.logits_processors = [processor]
    if adapters:
        from engine.vllm.adapters import check_supported, keep_slot_empty

        check_supported(list(adapters.values()), args.max_lora_rank)
        if on_cpu:
            keep_slot_empty(args)
    return LLMEngine.from_engine_args(args)


def _started(
    engine: Any,
    bridge: VllmBridge,
    folder: Path,
    version: str,
    adapters: Mapping[str, AdapterFiles],
    ranks: RankGroup | None = None,
) -> StartedVllm:
    # Imported here: it needs vLLM, or torch.
    from engine.vllm.kv_memory import block_order, fingerprint_of, kv_region, read_blocks, tied_tensors
    from engine.vllm.plugins import PrefixEvents

    scheduler, model = engine.engine_core.engine_core.scheduler, engine.model_config
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedModelError("engine vllm: models with several kinds of KV cannot be handed over")
    config = model.hf_config
    fingerprint = fingerprint_of(folder, config.to_dict(), tied_tensors(config))
    if ranks is None:
        order = block_order(engine.vllm_config, bridge.kv_caches)
        memory = kv_region(bridge.kv_caches, fingerprint, order, f"vllm-{version}")
    else:
        memory = ranks.memory(fingerprint, int(model.get_total_num_kv_heads()))
    # The last blocks are for lane probes: vLLM must never give them away.
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks[memory.request_blocks :]:
        pool.free_block_queue.remove(block)
        block.ref_cnt = 1
    events = KvEventLog()
    scheduler.kv_event_publisher = PrefixEvents(events)
    reader = partial(read_blocks, memory) if ranks is None else ranks.read_blocks
    loaded = None
    if adapters:
        from engine.vllm.adapters import LoadedAdapters

        loaded = LoadedAdapters(adapters, engine)
    facts = replace(_facts(model), adapters={name: files.adapter for name, files in adapters.items()})
    return StartedVllm(engine, bridge, facts, memory, events, reader, ranks, loaded)


def _facts(model: Any) -> ModelFacts:
    generation = model.try_get_generation_config() or {}
    end = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    tokens = [] if end is None else [end] if isinstance(end, int) else end
    return ModelFacts(int(model.max_model_len), int(model.get_vocab_size()), frozenset(map(int, tokens)))
