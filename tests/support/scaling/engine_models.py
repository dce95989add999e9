"""Engine models of tests, by the names of single times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoscaler.simulation.engine_model import EngineModel

_PREFILL = {"prefill_step_s": "base_s", "prefill_token_s": "token_s", "prefill_pair_s": "pair_s"}
_DECODE = {"sequence_s": "sequence_s", "context_token_s": "context_token_s"}


def engine_model(**values: Any) -> EngineModel:
    """The default model with these times, and limits by their own names."""
    return changed(EngineModel(), **values)


def changed(engine: EngineModel, **values: Any) -> EngineModel:
    """A copy with these times and limits. `step_s` is the base of both kinds of steps."""
    prefill = {part: values.pop(name) for name, part in _PREFILL.items() if name in values}
    decode = {part: values.pop(name) for name, part in _DECODE.items() if name in values}
    if "step_s" in values:
        decode["base_s"] = prefill["base_s"] = values.pop("step_s")
    parts = {"prefill": replace(engine.prefill, **prefill), "decode": replace(engine.decode, **decode)}
    return replace(engine, **parts, **values)
