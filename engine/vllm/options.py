"""vLLM's command line for a worker's settings, and the options of vLLM that a worker refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.gpus.worker_gpus import has_stages, vllm_ranks

MAX_RANKS = 64
CPU_BLOCK_MULTIPLE = 32
"""vLLM's attention on cpu packs keys and values of so many tokens."""
DEFAULT_CPU_BYTES = 1 << 30
DEFAULT_STEP_TOKENS = 512
DEFAULT_LOADED_ADAPTERS = 8
FIELD = "engine.engine_args"

BY_SETTING = {
    "--model": "model",
    "--dtype": "engine.dtype",
    "--block-size": "engine.block_size_tokens",
    "--num-gpu-blocks-override": "engine.num_blocks",
    "--kv-cache-memory-bytes": "engine.kv_memory_bytes",
    "--max-model-len": "engine.context_tokens",
    "--max-num-batched-tokens": "engine.max_step_tokens",
    "--max-num-scheduled-tokens": "engine.max_step_tokens",
    "--max-num-seqs": "engine.max_running_requests",
    "--max-num-active-seqs": "engine.max_running_requests",
    "--max-num-queued-reqs": "engine.max_waiting_requests",
    "--max-num-queued-tokens": "engine.max_waiting_requests",
    "--enable-prefix-caching": "engine.prefix_cache",
    "--no-enable-prefix-caching": "engine.prefix_cache",
    "--served-model-name": "served_model_name",
    "--enable-lora": "engine.adapters",
    "--no-enable-lora": "engine.adapters",
    "--lora-modules": "engine.adapters",
}
"""Options that a setting of splitserve stands for."""
REFUSED = {
    "--kv-transfer-config": "the handoff is splitserve's",
    "--kv-offloading-size": "the handoff is splitserve's",
    "--kv-events-config": "events of the prefix cache go to the coordinator",
    "--data-parallel-size": "start more workers",
    "--data-parallel-rank": "start more workers",
    "--data-parallel-start-rank": "start more workers",
    "--data-parallel-size-local": "start more workers",
    "--data-parallel-hybrid-lb": "start more workers",
    "--data-parallel-external-lb": "start more workers",
    "--data-parallel-multi-port-external-lb": "start more workers",
    "--enable-elastic-ep": "start more workers",
    "--prefill-context-parallel-size": "each rank holds all tokens",
    "--decode-context-parallel-size": "each rank holds all tokens",
    "--distributed-executor-backend": "ranks are child processes",
    "--nnodes": "a worker is on one machine",
    "--node-rank": "a worker is on one machine",
    "--worker-cls": "the handoff depends on vLLM's own",
    "--runner": "workers generate text",
    "--convert": "workers generate text",
    "--diffusion-config": "tokens are sampled one after the other",
    "--logits-processors": "the handoff's first token needs its own",
    "--scheduler-cls": "the handoff depends on vLLM's own scheduler",
    "--config": "give the options themselves",
}
"""Options that the handoff does not allow, and why."""
REFUSED_VALUES = {("--load-format", "dummy"): "workers of a model have the weights of its files"}
"""As above, single values."""
_SHORT = {
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""What vLLM takes for the names above."""


def own_arguments(config: EngineConfig, model_path: str, *, on_cpu: bool) -> list[str]:
    """What the settings say, as vLLM's command line; the user's own options come behind it."""
    step_tokens = step_tokens_of(config)
    arguments = {
        "--model": model_path,
        "--dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "--block-size": str(block_size_of(config, on_cpu=on_cpu)),
        "--max-num-batched-tokens": str(step_tokens),
        "--max-num-seqs": str(min(config.max_running_requests, step_tokens)),
    }
    flags: list[str] = []
    flags.append("--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching")
    if config.context_tokens is not None:
        arguments["--max-model-len"] = str(config.context_tokens)
    if config.num_blocks is not None:  # and vLLM's block 0, which stands for no block
        arguments["--num-gpu-blocks-override"] = str(config.num_blocks + 1)
    if config.kv_memory_bytes is not None or on_cpu:
        arguments["--kv-cache-memory-bytes"] = str(config.kv_memory_bytes or DEFAULT_CPU_BYTES)
    # Where vLLM compiles nothing, its cpu build makes no buffers between the stages of a pipeline.
    if on_cpu and not has_stages(config.engine_args):
        flags.append("--enforce-eager")
    if config.adapters:
        flags.append("--enable-lora")
        arguments["--max-loras"] = str(min(len(config.adapters), DEFAULT_LOADED_ADAPTERS))
    return [word for pair in arguments.items() for word in pair] + flags


def checked_options(engine_args: str) -> list[str]:
    """The words of `EngineConfig.engine_args`. Raises ConfigError (field `engine.engine_args`), naming the option."""
    try:
        words = shlex.split(engine_args)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}", field=FIELD) from None
    for name in _names(words):
        _require_allowed(name)
    return words


def require_own(own: Mapping[str, Any], parsed: Mapping[str, Any]) -> None:
    """Checks that the user's options changed none of those that they may not give, whatever their spelling.

    `own`, `parsed`: vLLM's values by name (`max_num_seqs`), of the settings alone and with the user's options. Raises
    ConfigError (field `engine.engine_args`), naming the option.
    """
    for name in (*BY_SETTING, *REFUSED):
        if parsed.get(_key(name)) != own.get(_key(name)):
            _require_allowed(name)
    for (name, value), why in REFUSED_VALUES.items():
        if parsed.get(_key(name)) == value:
            raise ConfigError(f"{FIELD}: {name} {value} is refused: {why}", field=FIELD)


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _require_allowed(name: str) -> None:
    name = _SHORT.get(name, name)
    if name in BY_SETTING:
        raise ConfigError(f"{FIELD}: {name} is set by {BY_SETTING[name]}", field=FIELD)
    if name in REFUSED:
        raise ConfigError(f"{FIELD}: {name} is refused: {REFUSED[name]}", field=FIELD)


def rank_count(engine_args: str) -> int:
    """The number of ranks that `EngineConfig.engine_args` ask for, of all stages. Raises ConfigError unless
    1..`MAX_RANKS`."""
    checked_options(engine_args)
    ranks = vllm_ranks(engine_args) or 1
    if ranks > MAX_RANKS:
        raise ConfigError(f"{FIELD}: vLLM may have 1..{MAX_RANKS} ranks, not {ranks}", field=FIELD)
    return ranks


def ranks_of(args: Any) -> int:
    """The ranks of vLLM's `EngineArgs`, of all stages."""
    return int(args.tensor_parallel_size * args.pipeline_parallel_size)


def block_size_of(config: EngineConfig, *, on_cpu: bool) -> int:
    """Tokens per block: the setting, on cpu rounded up to what vLLM's kernels can take."""
    multiple = CPU_BLOCK_MULTIPLE if on_cpu else 1
    return -(-config.block_size_tokens // multiple) * multiple


def step_tokens_of(config: EngineConfig) -> int:
    """The token budget of a step."""
    return config.max_step_tokens or DEFAULT_STEP_TOKENS


def _names(words: Sequence[str]) -> list[str]:
    """The options among the words, as vLLM's parser spells them: `--a_b=c` is `--a-b`, `-tp=2` is `-tp`."""
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    # `--kv-transfer-config.kv_role x` sets one key of a JSON option.
    return [name.partition(".")[0].replace("_", "-") for name in names]


MAX_REASON = 300
"""Characters of what vLLM says."""
SETTINGS = {name.lstrip("-").replace("-", "_"): setting for name, setting in BY_SETTING.items()}
SETTINGS["gpu_memory_utilization"] = SETTINGS["kv_cache_memory_bytes"]
"""By vLLM's name."""


def reason_of(error: BaseException) -> str:
    """The first line of what vLLM raised; of its checks of settings the first one that failed, with its field.

    Where it names settings of vLLM's that splitserve's stand for, these follow.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        text = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = f"{field}: {text}" if field else text
    else:
        text = str(error)
        if not text.strip() or isinstance(error, LookupError):  # such as a bare name
            text = f"{type(error).__name__}: {text}".strip(": ")
    named = [f"{name}: {setting}" for name, setting in SETTINGS.items() if re.search(rf"\b{name}\b", text)]
    return plain(text) + (f" ({', '.join(named)})" if named else "")


def plain(text: str) -> str:
    """The first line, without addresses of objects, cut at `MAX_REASON`."""
    lines = text.strip().splitlines()
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0] if lines else "")[:MAX_REASON]


def read_options(own: Sequence[str], given: Sequence[str]) -> Any:
    """vLLM's `EngineArgs` from the options of the settings, `own`, and the user's, `given`, read by vLLM's own parser.

    Options must be written in full. Raises ConfigError (field `engine.engine_args`) for an unknown or refused option
    and for a wrong value; prints nothing.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OptionParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:  # where vLLM's would end the process
            raise ConfigError(f"{FIELD}: {plain(message)}", field=FIELD)

    parser = EngineArgs.add_cli_args(OptionParser(prog="--engine-args", add_help=False, allow_abbrev=False))
    settings, parsed = parser.parse_args(list(own)), parser.parse_args([*own, *given])
    require_own(vars(settings), vars(parsed))
    try:
        return EngineArgs.from_cli_args(parsed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FIELD}: {reason_of(error)}", field=FIELD) from error
