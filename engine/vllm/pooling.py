"""Starts a vLLM with a pooling model: it computes an embedding or a score of a prompt. No KV leaves it."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import vllm
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_score_template
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from engine.core.model_runner import ModelFacts
from engine.model.loaded_model import files_fingerprint
from engine.vllm.links import end_with_starter
from engine.vllm.options import FIELD
from engine.vllm.processes import VllmProcesses
from engine.vllm.transport import VllmTransport
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError, UnsupportedModelError
from splitserve.v1 import generation_pb2

POOLING = "a pooling model"


class PoolingScheduler(Scheduler):
    """vLLM's scheduler. Its process ends with a worker that is killed; for other models the connector sees to that."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        end_with_starter()
        super().__init__(*arguments, **named)


def load_pooling(
    args: Any, config: EngineConfig, model: Any, folder: Path, processes: VllmProcesses
) -> tuple[Any, VllmTransport, ModelFacts, str]:
    """Returns vLLM's `LLMEngine` for its `EngineArgs` and `ModelConfig`, with the model in `folder`, of its pooling
    runner, and vLLM's task of all requests.

    Raises ConfigError for a setting that such a model cannot have, UnsupportedModelError for a model that computes
    neither embeddings of texts nor one score.
    """
    if config.adapters:
        raise ConfigError(f"engine.adapters: {POOLING} takes none", field="engine.adapters")
    if args.kv_offloading_size is not None:
        raise ConfigError(f"{FIELD}: --kv-offloading-size is not for {POOLING}", field=FIELD)
    args.scheduler_cls = f"{__name__}.{PoolingScheduler.__name__}"
    # vLLM ends at a cache that a model cannot have.
    args.enable_prefix_caching = args.enable_prefix_caching and model.is_prefix_caching_supported
    if config.max_step_tokens is None and not model.is_chunked_prefill_supported:
        # vLLM computes a prompt of this model in one step.
        args.max_num_batched_tokens = max(args.max_num_batched_tokens, model.max_model_len)
    engine_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    engine = LLMEngine.from_vllm_config(engine_config, disable_log_stats=args.disable_log_stats)
    task = engine.model_config.get_pooling_task(engine.get_supported_tasks())
    facts = ModelFacts(
        context_tokens=int(engine.model_config.max_model_len),
        vocabulary_size=int(engine.model_config.get_vocab_size()),
        eos_token_ids=frozenset(),
        scores_prompts=False,
        pooling=_pooling(engine.model_config, task),
    )
    fingerprint = files_fingerprint(folder, engine.model_config.hf_config)
    pooler = f"{fingerprint} {engine.model_config.pooler_config}"
    layout = KvLayout(
        model_fingerprint=hashlib.sha256(pooler.encode()).hexdigest(),
        dtype=str(engine.model_config.dtype).removeprefix("torch."),
        block_size_tokens=1,
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
        engine_version=f"vllm-{vllm.__version__}",
    )
    # No memory: coordinators send it no peers.
    memory = KvMemoryRegion(base_address=0, num_blocks=0, layout=layout)
    transport = VllmTransport(processes, "", 1, memory, str(uuid.uuid4()))
    return engine, transport, facts, task


def _pooling(model: Any, task: str | None) -> generation_pb2.Pooling.ValueType:
    """Returns what a model computes, by vLLM's task. Raises UnsupportedModelError."""
    why = f"vLLM's task {task}"
    if (model.encoder_config or {}).get("do_lower_case"):
        why = "texts in lower case (do_lower_case)"
    elif task == "embed":
        return generation_pb2.POOLING_EMBED
    elif task == "classify" and (labels := getattr(model.hf_config, "num_labels", 0)) != 1:
        why = f"{labels} labels"
    elif task == "classify" and supports_score_template(get_model_cls(model)):
        why = "pairs of texts in a form of its own"
    elif task == "classify":
        joined, pair = generation_pb2.POOLING_SCORE_JOINED, generation_pb2.POOLING_SCORE
        return pair if model.use_sep_token else joined
    message = f"engine vllm: only embeddings and scores of texts are served, this model needs {why}"
    raise UnsupportedModelError(message)
