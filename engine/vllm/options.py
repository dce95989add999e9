"""Translates a worker's settings into vLLM's options, and refuses options of the user that splitserve sets itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import ValidationError

from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.gpus.worker_gpus import has_stages, vllm_ranks

MAX_RANKS = 64
CPU_BLOCK_MULTIPLE = 32
"""On CPU, vLLM's attention packs the KV of this many tokens."""
MAX_REASON = 300
"""How many characters of vLLM's error messages are shown."""
DEFAULT_CPU_BYTES = 1 << 30
DEFAULT_CPU_STEP_TOKENS, DEFAULT_GPU_STEP_TOKENS = 512, 2048
DEFAULT_LOADED_ADAPTERS = 8
FIELD = "engine.engine_args"

BY_SETTING = {
    "model": "model",
    "dtype": "engine.dtype",
    "block_size": "engine.block_size_tokens",
    "num_gpu_blocks_override": "engine.num_blocks",
    "kv_cache_memory_bytes": "engine.kv_memory_bytes",
    "gpu_memory_utilization": "engine.device_memory_share",
    "max_model_len": "engine.context_tokens",
    "max_num_batched_tokens": "engine.max_step_tokens",
    "max_num_scheduled_tokens": "engine.max_step_tokens",
    "max_num_seqs": "engine.max_running_requests",
    "max_num_active_seqs": "engine.max_running_requests",
    "max_num_queued_reqs": "engine.max_waiting_requests",
    "max_num_queued_tokens": "engine.max_waiting_requests",
    "enable_prefix_caching": "engine.prefix_cache",
    "served_model_name": "served_model_name",
    "enable_lora": "engine.adapters",
}
"""Options of vLLM that a setting of splitserve sets, by their names in vLLM's `EngineArgs`."""
REFUSED = {
    name: why
    for why, names in {
        "the handoff is splitserve's": "kv_transfer_config",
        "beside the handoff vLLM's own backend works": "kv_offloading_backend",
        "events of the prefix cache go to the coordinator": "kv_events_config",
        "start more workers; --enable-expert-parallel shares out experts among the ranks of one": (
            "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
            "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
            "enable_elastic_ep"
        ),
        "each rank holds all tokens": "prefill_context_parallel_size decode_context_parallel_size",
        "ranks are child processes": "distributed_executor_backend",
        "a worker is on one machine": "nnodes node_rank",
        "the handoff depends on vLLM's own": "worker_cls scheduler_cls",
        "the handoff's first token needs its own": "worker_extension_cls logits_processors",
        "tokens are sampled one after the other": "diffusion_config",
    }.items()
    for name in names.split()
}
"""Options of vLLM that are refused, and why."""


def own_options(config: EngineConfig, model_path: str, *, on_cpu: bool) -> dict[str, Any]:
    """Returns the settings as vLLM's `EngineArgs`, by name. The user's options override what `BY_SETTING` lacks."""
    step_tokens = config.max_step_tokens or (DEFAULT_CPU_STEP_TOKENS if on_cpu else DEFAULT_GPU_STEP_TOKENS)
    multiple = CPU_BLOCK_MULTIPLE if on_cpu else 1
    options = {
        "model": model_path,
        "dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "block_size": -(-config.block_size_tokens // multiple) * multiple,
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": min(config.max_running_requests, step_tokens),
        "max_model_len": config.context_tokens,
        "enable_prefix_caching": config.prefix_cache,
        # vLLM needs one block more: its block 0 holds no KV.
        "num_gpu_blocks_override": config.num_blocks and config.num_blocks + 1,
        "kv_cache_memory_bytes": config.kv_memory_bytes or (DEFAULT_CPU_BYTES if on_cpu else None),
        # On CPU, vLLM makes the buffers between pipeline stages only when it compiles the model.
        "enforce_eager": on_cpu and not has_stages(config.engine_args),
        "enable_lora": bool(config.adapters),
        "max_loras": max(1, min(len(config.adapters), DEFAULT_LOADED_ADAPTERS)),
    }
    return options if on_cpu else options | {"gpu_memory_utilization": config.device_memory_share}


def rank_count(engine_args: str) -> int:
    """Returns the number of ranks in `EngineConfig.engine_args`: tensor times pipeline parallel size, 1 by default.

    Raises ConfigError (field `engine.engine_args`) outside 1..`MAX_RANKS`.
    """
    ranks = vllm_ranks(engine_args) or 1
    if ranks > MAX_RANKS:
        raise ConfigError(f"{FIELD}: vLLM may have 1..{MAX_RANKS} ranks, not {ranks}", field=FIELD)
    return ranks


def reason_of(error: BaseException) -> str:
    """Returns why vLLM failed, in one line: the first line of its exception.

    For a failed check of settings this is the first check, with its field. Where the line names settings of vLLM that
    splitserve's settings stand for, these follow in parentheses.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = f"{field}: {text}" if field else text
    else:
        text = str(error)
        # Alone, the text of a LookupError is just the missing key.
        if not text.strip() or isinstance(error, LookupError):
            text = f"{type(error).__name__}: {text}".strip(": ")
    named = [f"{name}: {setting}" for name, setting in BY_SETTING.items() if re.search(rf"\b{name}\b", text)]
    return _first_line(text) + (f" ({', '.join(named)})" if named else "")


def _first_line(text: str) -> str:
    """The first line of a message, without addresses of objects, cut at `MAX_REASON` characters."""
    return re.sub(r" at 0x[0-9a-f]+", "", text.strip().partition("\n")[0])[:MAX_REASON]


def read_options(config: EngineConfig, model_path: str, *, on_cpu: bool) -> Any:
    """Returns vLLM's `EngineArgs` for the settings and `EngineConfig.engine_args`, read by vLLM's own parser.

    The user must write options in full. Raises ConfigError (field `engine.engine_args`) for an unknown or refused
    option and for a wrong value; prints nothing.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OptionParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:  # argparse would print the message and end the process
            raise ConfigError(f"{FIELD}: {_first_line(message)}", field=FIELD)

        def load_config_file(self, file_path: str) -> NoReturn:
            self.error("--config is refused: give the options themselves")

    parser = EngineArgs.add_cli_args(OptionParser(prog="--engine-args", add_help=False, allow_abbrev=False))
    parser.set_defaults(**own_options(config, model_path, on_cpu=on_cpu))
    parsed = parser.parse_args(shlex.split(config.engine_args))
    require_own(vars(parser.parse_args([])), vars(parsed))
    try:
        return EngineArgs.from_cli_args(parsed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FIELD}: {reason_of(error)}", field=FIELD) from error


def require_own(own: Mapping[str, Any], parsed: Mapping[str, Any]) -> None:
    """Checks that the user's options change no refused option, however they were spelled.

    `own`, `parsed`: vLLM's values by name (`max_num_seqs`), without and with the user's options. Raises ConfigError
    (field `engine.engine_args`), naming the option.
    """
    whys = {name: f"set by {setting}" for name, setting in BY_SETTING.items()}
    whys |= {name: f"refused: {why}" for name, why in REFUSED.items()}
    for name, why in whys.items():
        if parsed.get(name) != own.get(name):
            raise ConfigError(f"{FIELD}: --{name.replace('_', '-')} is {why}", field=FIELD)
    if parsed["load_format"] == "dummy":
        message = f"{FIELD}: --load-format dummy is refused: workers of a model have the weights of its files"
        raise ConfigError(message, field=FIELD)
