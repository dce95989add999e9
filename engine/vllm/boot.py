"""Starts vLLM in this process. What is known of its insides stands here and in the modules that it loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.types import ModelFacts
from engine.kv_cache.cache_events import KvEventLog
from engine.vllm.bridge import VllmBridge, close_bridge, open_bridge
from engine.vllm.options import checked_options, vllm_arguments
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, SplitserveError, UnavailableError, UnsupportedModelError

SUPPORTED = "0.32."
"""Start of the versions of vLLM that the tests run with. Its connector interface is marked experimental."""


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """vLLM with its model loaded and its KV cache allocated."""

    engine: Any
    """A `vllm.v1.engine.llm_engine.LLMEngine`, in this process."""
    bridge: VllmBridge
    facts: ModelFacts
    memory: KvMemoryRegion
    events: KvEventLog

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
        close_bridge()


def start_vllm(config: EngineConfig, folder: Path) -> StartedVllm:
    """Loads the model in `folder`; takes seconds. Call it on the engine thread, once a process.

    Raises UnavailableError (VLLM_MISSING) without a supported vLLM, ConfigError for options that are refused,
    UnsupportedModelError for a model whose KV cannot be handed over or that vLLM does not load.
    """
    checked_options(config.engine_args)  # before vLLM's import, which takes seconds
    threads = config.threads or len(os.sched_getaffinity(0))
    _prepare_environment(threads)
    version, on_cpu = _require_vllm()
    arguments = vllm_arguments(config, str(folder), on_cpu=on_cpu)
    import torch

    torch.set_num_threads(threads)  # before vLLM forbids it
    bridge = open_bridge()
    try:
        engine = _load(arguments)
        return _started(engine, bridge, folder, version)
    except SplitserveError:
        close_bridge()
        raise
    except (ValueError, NotImplementedError, OSError, RuntimeError) as error:
        close_bridge()
        why = str(error).strip().splitlines()
        raise UnsupportedModelError(f"vLLM cannot serve {folder}: {why[0] if why else error!r}") from error


def _prepare_environment(threads: int) -> None:
    """Variables that vLLM and OpenMP read when they are loaded; those that are set stay."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
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
        message = f"engine vllm: vLLM is not installed, see docs/vllm.md ({error})"
        raise UnavailableError(message, reason="VLLM_MISSING") from None
    finally:
        logging.disable(disabled)
    version = str(vllm.__version__)
    if not version.startswith(SUPPORTED):
        message = f"engine vllm: vLLM {version} is not supported, only {SUPPORTED}x"
        raise UnavailableError(message, reason="VLLM_MISSING")
    return version, bool(current_platform.is_cpu())


def _load(arguments: Sequence[str]) -> Any:
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="--engine-args", exit_on_error=False))
    try:
        parsed = parser.parse_args(list(arguments))
    except SystemExit:
        raise ConfigError(
            "engine.engine_args: vLLM does not know these options", field="engine.engine_args"
        ) from None
    args = EngineArgs.from_cli_args(parsed)
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="SplitserveConnector",
        kv_connector_module_path="engine.vllm.connector",
        kv_role="kv_both",
    )
    args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    args.logits_processors = ["engine.vllm.sampling_processor:SamplingProcessor"]
    return LLMEngine.from_engine_args(args)


def _started(engine: Any, bridge: VllmBridge, folder: Path, version: str) -> StartedVllm:
    # Imported here: it needs vLLM, or torch.
    from engine.vllm.kv_memory import kv_region
    from engine.vllm.prefix_events import PrefixEvents

    scheduler, model = engine.engine_core.engine_core.scheduler, engine.model_config
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedModelError("engine vllm: models with several kinds of KV cannot be handed over")
    memory = kv_region(bridge.kv_caches, folder, model.hf_config.to_dict(), _order(engine), f"vllm-{version}")
    # The last blocks are for lane probes: vLLM must never give them away.
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks[memory.request_blocks :]:
        pool.free_block_queue.remove(block)
        block.ref_cnt = 1
    events = KvEventLog()
    scheduler.kv_event_publisher = PrefixEvents(events)
    return StartedVllm(engine, bridge, _facts(model), memory, events)


def _order(engine: Any) -> str:
    """How vLLM's kernels read a block: the attention backend, and on cpu the instructions that it was packed for."""
    layers = engine.vllm_config.compilation_config.static_forward_context
    layer = next(iter(layers.values()))
    backend = layer.get_attn_backend()
    packing = f",{layer.isa}" if backend.get_name() == "CPU_ATTN" else ""
    return f"vllm:{backend.get_name().lower()}{packing}:layer,block"


def _facts(model: Any) -> ModelFacts:
    generation = model.try_get_generation_config() or {}
    end = generation.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    tokens = [] if end is None else [end] if isinstance(end, int) else end
    return ModelFacts(int(model.max_model_len), int(model.get_vocab_size()), frozenset(map(int, tokens)))
