"""Translates a worker's settings into vLLM's options, and refuses options of the user that splitserve sets itself."""

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
"""On CPU, vLLM's attention packs the KV of this many tokens."""
MAX_REASON = 300
"""How many characters of vLLM's error messages are shown."""
DEFAULT_CPU_BYTES = 1 << 30
DEFAULT_CPU_STEP_TOKENS, DEFAULT_GPU_STEP_TOKENS = 512, 2048
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
"""Options of vLLM that a setting of splitserve sets."""
REFUSED = {
    f"--{name}": why
    for why, names in {
        "the handoff is splitserve's": "kv-transfer-config kv-offloading-size",
        "events of the prefix cache go to the coordinator": "kv-events-config",
        "start more workers; --enable-expert-parallel shares out experts among the ranks of one": (
            "data-parallel-size data-parallel-rank data-parallel-start-rank data-parallel-size-local "
            "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
            "enable-elastic-ep"
        ),
        "each rank holds all tokens": "prefill-context-parallel-size decode-context-parallel-size",
        "ranks are child processes": "distributed-executor-backend",
        "a worker is on one machine": "nnodes node-rank",
        "the handoff depends on vLLM's own": "worker-cls scheduler-cls",
        "the handoff's first token needs its own": "worker-extension-cls logits-processors",
        "workers generate text": "runner convert",
        "tokens are sampled one after the other": "diffusion-config",
        "give the options themselves": "config",
    }.items()
    for name in names.split()
}
"""Options of vLLM that are refused, and why."""
REFUSED_VALUES = {("--load-format", "dummy"): "workers of a model have the weights of its files"}
"""Single values of options that are refused, and why."""
_SHORT = {
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""Short names that vLLM takes for options above."""


def _key(name: str) -> str:
    """An option's name in vLLM's `EngineArgs`: `max_num_seqs` for `--max-num-seqs`."""
    return name.lstrip("-").replace("-", "_")


_SETTINGS = {_key(name): setting for name, setting in BY_SETTING.items()}
_SETTINGS["gpu_memory_utilization"] = "engine.device_memory_share"
"""The setting that stands for a name in vLLM's error messages."""


def own_arguments(config: EngineConfig, model_path: str, *, on_cpu: bool) -> list[str]:
    """Returns the settings as arguments of vLLM's command line. The user's own options go behind them."""
    step_tokens = step_tokens_of(config, on_cpu=on_cpu)
    arguments = {
        "--model": model_path,
        "--dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "--block-size": str(block_size_of(config, on_cpu=on_cpu)),
        "--max-num-batched-tokens": str(step_tokens),
        "--max-num-seqs": str(min(config.max_running_requests, step_tokens)),
    }
    flags = ["--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching"]
    if config.context_tokens is not None:
        arguments["--max-model-len"] = str(config.context_tokens)
    # vLLM needs one block more: its block 0 holds no KV.
    if config.num_blocks is not None:
        arguments["--num-gpu-blocks-override"] = str(config.num_blocks + 1)
    if not on_cpu:
        arguments["--gpu-memory-utilization"] = str(config.device_memory_share)
    if config.kv_memory_bytes is not None or on_cpu:
        arguments["--kv-cache-memory-bytes"] = str(config.kv_memory_bytes or DEFAULT_CPU_BYTES)
    # On CPU, vLLM makes the buffers between pipeline stages only when it compiles the model.
    if on_cpu and not has_stages(config.engine_args):
        flags.append("--enforce-eager")
    if config.adapters:
        flags.append("--enable-lora")
        arguments["--max-loras"] = str(min(len(config.adapters), DEFAULT_LOADED_ADAPTERS))
    return [word for pair in arguments.items() for word in pair] + flags


def checked_options(engine_args: str) -> list[str]:
    """Splits `EngineConfig.engine_args` into words, as a shell does.

    Raises ConfigError (field `engine.engine_args`) for a refused option, naming it.
    """
    try:
        words = shlex.split(engine_args)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}", field=FIELD) from None
    for word in words:
        # vLLM's parser takes `--a_b=c` for `--a-b c`. `--a.b c` sets one key of a JSON option.
        if word.startswith("-"):
            _require_allowed(word.partition("=")[0].partition(".")[0].replace("_", "-"))
    return words


def require_own(own: Mapping[str, Any], parsed: Mapping[str, Any]) -> None:
    """Checks that the user's options change no refused option, whatever its spelling.

    `own`, `parsed`: vLLM's values by name (`max_num_seqs`), without and with the user's options. Raises ConfigError
    (field `engine.engine_args`), naming the option.
    """
    for name in (*BY_SETTING, *REFUSED):
        if parsed.get(_key(name)) != own.get(_key(name)):
            _require_allowed(name)
    for (name, value), why in REFUSED_VALUES.items():
        if parsed.get(_key(name)) == value:
            raise ConfigError(f"{FIELD}: {name} {value} is refused: {why}", field=FIELD)


def _require_allowed(name: str) -> None:
    name = _SHORT.get(name, name)
    if name in BY_SETTING:
        raise ConfigError(f"{FIELD}: {name} is set by {BY_SETTING[name]}", field=FIELD)
    if name in REFUSED:
        raise ConfigError(f"{FIELD}: {name} is refused: {REFUSED[name]}", field=FIELD)


def rank_count(engine_args: str) -> int:
    """Returns the number of ranks in `EngineConfig.engine_args`: tensor times pipeline parallel size, 1 by default.

    Raises ConfigError (field `engine.engine_args`) outside 1..`MAX_RANKS`.
    """
    ranks = vllm_ranks(engine_args) or 1
    if ranks > MAX_RANKS:
        raise ConfigError(f"{FIELD}: vLLM may have 1..{MAX_RANKS} ranks, not {ranks}", field=FIELD)
    return ranks


def block_size_of(config: EngineConfig, *, on_cpu: bool) -> int:
    """Returns the tokens per block: the setting, on CPU rounded up to a multiple of `CPU_BLOCK_MULTIPLE`."""
    multiple = CPU_BLOCK_MULTIPLE if on_cpu else 1
    return -(-config.block_size_tokens // multiple) * multiple


def step_tokens_of(config: EngineConfig, *, on_cpu: bool) -> int:
    """Returns the token budget of a step."""
    return config.max_step_tokens or (DEFAULT_CPU_STEP_TOKENS if on_cpu else DEFAULT_GPU_STEP_TOKENS)


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
    named = [f"{name}: {setting}" for name, setting in _SETTINGS.items() if re.search(rf"\b{name}\b", text)]
    return _first_line(text) + (f" ({', '.join(named)})" if named else "")


def _first_line(text: str) -> str:
    """The first line of a message, without addresses of objects, cut at `MAX_REASON` characters."""
    return re.sub(r" at 0x[0-9a-f]+", "", text.strip().partition("\n")[0])[:MAX_REASON]


def read_options(own: Sequence[str], options: Sequence[str]) -> Any:
    """Returns vLLM's `EngineArgs` for the words of `own_arguments` and `checked_options`, read by vLLM's own parser.

    The user must write options in full. Raises ConfigError (field `engine.engine_args`) for an unknown or refused
    option and for a wrong value; prints nothing.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OptionParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:  # argparse would print the message and end the process
            raise ConfigError(f"{FIELD}: {_first_line(message)}", field=FIELD)

    parser = EngineArgs.add_cli_args(OptionParser(prog="--engine-args", add_help=False, allow_abbrev=False))
    settings, parsed = parser.parse_args(list(own)), parser.parse_args([*own, *options])
    require_own(vars(settings), vars(parsed))
    try:
        return EngineArgs.from_cli_args(parsed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FIELD}: {reason_of(error)}", field=FIELD) from error
