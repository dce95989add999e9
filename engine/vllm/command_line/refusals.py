"""Why vLLM does not start, in one sentence. Needs no vLLM."""

from __future__ import annotations

import re

from pydantic import ValidationError

from engine.vllm.command_line.options import BY_SETTING

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
