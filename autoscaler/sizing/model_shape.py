"""What sizing needs to know of a model: its config.json, or figures that were given. No weights are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaler.sizing.engine_model import DEFAULT_CONTEXT_TOKENS
from splitserve.errors import InvalidArgumentError
from splitserve.runtime.bounded_file import read_named_text

WEIGHT_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
KV_BITS = {"bf16": 16, "fp16": 16, "fp8": 8}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the usual kind: attention with grouped queries, gated feed-forward, perhaps experts."""

    name: str
    parameters: float
    active_parameters: float
    """Those that a token is computed with: fewer with experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    weights: str = "bf16"
    """One of WEIGHT_BITS."""
    kv: str = "bf16"
    """One of KV_BITS."""
    context_tokens: int = DEFAULT_CONTEXT_TOKENS

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * WEIGHT_BITS[self.weights] / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BITS[self.kv] // 8


@dataclass(frozen=True, slots=True)
class GivenShape:
    """What the command line says of a model; None: as its file has it."""

    params: str | None = None
    active_params: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None


def shape_of(name: str, config: Mapping[str, Any], given: GivenShape) -> ModelShape:
    """The model of a config.json, or of what was given, which comes first.

    Raises InvalidArgumentError naming what is missing or wrong.
    """
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    if "kv_lora_rank" in config:
        message = (
            "model: latent attention (kv_lora_rank) is not modelled: measure it, and give --engine-model"
        )
        raise InvalidArgumentError(message, field="model")
    total = None if given.params is None else _size("params", given.params)
    layers = _count("layers", given.layers, config.get("num_hidden_layers"))
    head_dim = given.head_dim or config.get("head_dim")
    hidden, heads = config.get("hidden_size"), given.heads or config.get("num_attention_heads")
    hidden = None if hidden is None else _count("hidden_size", None, hidden)
    heads = None if heads is None else _count("heads", None, heads)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    head_dim = _count("head_dim", None, head_dim)
    if hidden is None and heads is None and total is not None:
        # 12 h^2 parameters a layer, as in Kaplan et al. 2020 (arXiv:2001.08361): good for the attention's share.
        hidden = math.sqrt((_size("active_params", given.active_params or str(total))) / 12 / layers)
    heads = _count("heads", None, heads or max(1, round((hidden or 0) / head_dim)))
    hidden = round(hidden) if hidden else heads * head_dim
    kv_heads = _count("kv_heads", given.kv_heads, config.get("num_key_value_heads") or heads)
    counted = None if total is not None else _counted(config, layers, heads, kv_heads, head_dim)
    parameters, active = (total, total) if counted is None else counted
    if parameters is None or active is None:
        raise AssertionError  # one of both is always known: _counted raises otherwise
    if given.active_params is not None:
        active = _size("active_params", given.active_params)
    if active > parameters:
        message = f"active_params must be at most params, {parameters:g}, not {active:g}"
        raise InvalidArgumentError(message, field="active_params")
    return ModelShape(
        name=name,
        parameters=parameters,
        active_parameters=active,
        layers=layers,
        heads=heads,
        kv_heads=min(kv_heads, heads),
        head_dim=head_dim,
        hidden=hidden,
        weights=_one_of("weight_dtype", given.weight_dtype or _stored(config), WEIGHT_BITS),
        kv=_one_of("kv_dtype", given.kv_dtype or "bf16", KV_BITS),
        context_tokens=_count(
            "max_position_embeddings",
            None,
            config.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS,
        ),
    )


def read_config(path: Path) -> Mapping[str, Any]:
    """A config.json. Raises InvalidArgumentError."""
    text = read_named_text(path, "model")
    try:
        found = json.loads(text)
    except (RecursionError, ValueError):
        raise InvalidArgumentError(f"model: {path} is no JSON", field="model") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"model: {path} is not an object", field="model")
    return found


def _counted(
    config: Mapping[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[float, float]:
    """Parameters in all, and those of a token."""
    hidden = _count("hidden_size", None, config.get("hidden_size"))
    inner = _count("intermediate_size", None, config.get("intermediate_size"))
    vocabulary = _count("vocab_size", None, config.get("vocab_size"))
    embedding = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    if not experts:
        total = float(embedding + layers * (attention + 3 * hidden * inner))
        return total, total
    experts = _count("experts", None, experts)
    one = 3 * hidden * _count("moe_intermediate_size", None, config.get("moe_intermediate_size") or inner)
    shared = config.get("shared_expert_intermediate_size") or 0
    shared = 3 * hidden * (_count("shared_expert_intermediate_size", None, shared) if shared else 0)
    used = _count("num_experts_per_tok", None, config.get("num_experts_per_tok"))
    always = embedding + layers * (attention + shared + hidden * experts)
    return float(always + layers * experts * one), float(always + layers * used * one)


def _stored(config: Mapping[str, Any]) -> str:
    """The width of the weights as the file has them."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        found = {"fp8": "fp8", "fbgemm_fp8": "fp8"}.get(str(quantized.get("quant_method")))
        found = found or {"4": "int4", "8": "int8"}.get(str(quantized.get("bits")))
        if found is None:
            message = "model: its quantization is not known: give --weight-dtype"
            raise InvalidArgumentError(message, field="weight_dtype")
        return found
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _count(name: str, given: int | None, stored: Any) -> int:
    value = stored if given is None else given
    if value is None:
        message = f"model: {name} is not known: give a config.json, or --params, --layers, --kv-heads and --head-dim"
        raise InvalidArgumentError(message, field=name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
        raise InvalidArgumentError(f"{name} must be a whole number of 1..{2**24}, not {value!r}", field=name)
    return value


def _size(name: str, text: str) -> float:
    match = _SIZE.fullmatch(text.strip())
    value = float(match[1]) * _FACTORS[match[2].upper()] if match else 0.0
    if not 1e3 <= value <= 1e14:
        raise InvalidArgumentError(f"{name} must be a number as 8B or 135M, not {text!r}", field=name)
    return value


def _one_of(name: str, value: str, known: Mapping[str, int]) -> str:
    if value not in known:
        raise InvalidArgumentError(f"{name} must be {', '.join(known)}, not {value!r}", field=name)
    return value
