"""Which type KV blocks have, and where that is refused. Needs no torch."""

from __future__ import annotations

from kv_transfer.layout import INT8
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError

FIELD = "engine.kv_cache_dtype"


def kv_dtype(config: EngineConfig, dtype: str) -> str:
    """The dtype of KV blocks with weights in `dtype`. Raises ConfigError (`engine.kv_cache_dtype`) if that cannot be.

    float32 is for exactness, which narrowing would defeat.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if dtype != "bfloat16":
        message = f"{FIELD}: {config.kv_cache_dtype} is for dtype bfloat16; this engine's is {dtype}"
        raise ConfigError(message, field=FIELD)
    return INT8


def refuse_int8_kv(config: EngineConfig, what: str) -> None:
    """Raises ConfigError (`engine.kv_cache_dtype`) if the settings ask `what` for int8 KV, which it does not have."""
    if config.kv_cache_dtype != "auto":
        message = f"{FIELD}: {what} has no KV in {config.kv_cache_dtype}; only auto"
        raise ConfigError(message, field=FIELD)
