"""Speeds of replica classes by the engine models of their replicas, for policy files that give these, not numbers.

A class is as fast as it computes a prompt (prefill), or as many output tokens a second as it makes with a batch in
which each stream keeps the target (decode). The slowest of a pool has speed 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoscaler.sizing.engine_model import EngineModel
from autoscaler.sizing.engine_model_file import load_engine_model
from autoscaler.snapshot import PoolName
from splitserve.errors import ConfigError, InvalidArgumentError

DEFAULT_TOKENS = 2048
"""Length of the prompt, or of each stream's context, at which models are compared."""
MOST_TOKENS = 2**24
MAX_CLASSES = 6
"""Of a pool."""


def work_rate(model: EngineModel, pool: PoolName, tokens: int, target_s: float | None) -> float:
    """Tokens a second of one replica: of a prompt of this length alone, or output of a batch with this much context
    each whose steps take at most `target_s`. 0: it cannot."""
    if tokens > model.context_tokens:
        return 0.0
    if pool == "prefill":
        prompt_s = model.prompt_s(tokens)
        return tokens / prompt_s if prompt_s > 0 else 0.0
    batch = float(min(model.max_running_requests, model.kv_capacity_tokens // tokens))
    each_s = model.sequence_s + model.context_token_s * tokens
    if target_s is not None and each_s > 0:
        batch = min(batch, (target_s - model.step_s) / each_s + 1e-9)
    batch = math.floor(batch)
    step_s = model.decode_step_s(batch, batch * tokens)
    return batch / step_s if batch >= 1 and 0 < step_s <= (target_s or math.inf) + 1e-9 else 0.0


def with_speeds(pool: PoolName, values: Any, folder: Path) -> Any:
    """A pool's values as they are in the file, with the `speed` of each class that has an `engine_model`, whose path,
    relative to `folder`, becomes absolute. What is of a wrong type is left to validation.

    Raises ConfigError naming the field.
    """
    classes = values.get("classes") if isinstance(values, dict) else None
    if not isinstance(classes, list) or not all(isinstance(one, dict) for one in classes):
        return values
    if not any(isinstance(one.get("engine_model"), str) for one in classes):
        return values
    _check(pool, classes)
    target_ms = values.get("target_ms")
    tokens = values.get("speed_at_tokens", DEFAULT_TOKENS)
    paths = [str((folder / one["engine_model"]).absolute()) for one in classes]
    known = target_ms is None or (isinstance(target_ms, int | float) and 0 < target_ms <= sys.float_info.max)
    if not known or type(tokens) is not int or not 0 < tokens <= MOST_TOKENS:  # validation says so
        speeds = [1.0 for _ in classes]
    else:
        rates = {
            place: _rate(pool, place, Path(path), tokens, None if target_ms is None else target_ms / 1e3)
            for place, path in enumerate(paths)
        }
        speeds = _relative(rates)
    filled = [
        {**one, "engine_model": path, "speed": speed}
        for one, path, speed in zip(classes, paths, speeds, strict=True)
    ]
    return {**values, "classes": filled}


def _check(pool: PoolName, classes: list[dict[str, Any]]) -> None:
    if len(classes) > MAX_CLASSES:
        message = f"{pool}.classes must be at most {MAX_CLASSES}, not {len(classes)}"
        raise ConfigError(message, field=f"{pool}.classes")
    for place, one in enumerate(classes):
        field = f"{pool}.classes.{place}"
        if not isinstance(one.get("engine_model"), str):
            message = "must be a file in all classes of a pool or in none: speeds are relative to the slowest"
            raise ConfigError(f"{field}.engine_model {message}", field=f"{field}.engine_model")
        if "speed" in one:
            message = "must not be given with engine_model, which says it"
            raise ConfigError(f"{field}.speed {message}", field=f"{field}.speed")


def _rate(pool: PoolName, place: int, path: Path, tokens: int, target_s: float | None) -> float:
    field = f"{pool}.classes.{place}.engine_model"
    try:
        rate = work_rate(load_engine_model(path), pool, tokens, target_s)
    except InvalidArgumentError as error:
        raise ConfigError(f"{field}: {error.message}", field=field) from None
    if not 0 < rate < math.inf:
        within = "" if target_s is None or pool == "prefill" else f" within target_ms ({target_s * 1e3:g})"
        what = f"a prompt of {tokens} tokens" if pool == "prefill" else f"a step of one stream{within}"
        message = f"{field}: {path} cannot compute {what}; speed_at_tokens is {tokens}"
        raise ConfigError(message, field=field)
    return rate


def _relative(rates: Mapping[int, float]) -> list[float]:
    """To the slowest. Two places are as much as a model tells, and keep mixes from telling equals apart."""
    slowest = min(rates.values())
    return [round(rate / slowest, 2) for rate in rates.values()]
