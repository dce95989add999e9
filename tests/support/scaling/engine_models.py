"""Engine models of tests, by the names of single times, and shapes of models that sizing is tested with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.sizing.model_shape import shape_of

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


CONFIG_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LARGER = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""With a vocabulary of 96,000 they are 70.0 billion parameters."""
LLAMA_8B = shape_of("8b", CONFIG_8B)
LLAMA_70B = shape_of("70b", CONFIG_8B | LARGER | {"vocab_size": 96_000})
