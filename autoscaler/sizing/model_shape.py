"""A model's sizes, read from its config.json for sizing. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoscaler.simulation.engine_model import DEFAULT_CONTEXT_TOKENS
from splitserve.errors import InvalidArgumentError

WEIGHT_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
_KV_BYTES = 2
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST = 2**24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of the usual kind: attention with grouped queries, gated feed-forward, perhaps experts."""

    name: str
    parameters: float
    active_parameters: float
    """Parameters that one token uses: fewer in models with experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    weights: str = "bf16"
    """One of WEIGHT_BITS."""
    context_tokens: int = DEFAULT_CONTEXT_TOKENS

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * WEIGHT_BITS[self.weights] / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers, 16 bits each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _KV_BYTES


def shape_of(name: str, config: Mapping[str, Any], weight_dtype: str | None = None) -> ModelShape:
    """The model of a config.json. `weight_dtype`, one of WEIGHT_BITS, replaces the file's own dtype of weights.

    Raises InvalidArgumentError naming what is missing or wrong.
    """
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    if "kv_lora_rank" in config:
        message = "model: latent attention (kv_lora_rank) is not modelled: plan with --target, a cluster that serves it"
        raise InvalidArgumentError(message, field="model")
    weights = weight_dtype or _stored(config)
    if weights not in WEIGHT_BITS:
        message = f"weight_dtype must be {', '.join(WEIGHT_BITS)}, not {weights!r}"
        raise InvalidArgumentError(message, field="weight_dtype")
    layers, hidden = _count(config, "num_hidden_layers"), _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    head_dim = _count(config, "head_dim", max(1, hidden // heads))
    parameters, active = _counted(config, layers, heads, kv_heads, head_dim)
    return ModelShape(
        name,
        parameters,
        active,
        layers,
        heads,
        min(kv_heads, heads),
        head_dim,
        hidden,
        weights,
        _count(config, "max_position_embeddings", DEFAULT_CONTEXT_TOKENS),
    )


def _counted(
    config: Mapping[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[float, float]:
    """All parameters, and the parameters that one token uses."""
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    embedding = _count(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    expert_key = next((key for key in _EXPERTS if config.get(key)), None)
    if expert_key is None:
        total = float(embedding + layers * (attention + 3 * hidden * inner))
        return total, total
    experts = _count(config, expert_key)
    expert = 3 * hidden * _count(config, "moe_intermediate_size", inner)
    shared = 3 * hidden * _count(config, "shared_expert_intermediate_size", 0)
    always = embedding + layers * (attention + shared + hidden * experts)
    used = _count(config, "num_experts_per_tok")
    return float(always + layers * experts * expert), float(always + layers * used * expert)


def _stored(config: Mapping[str, Any]) -> str:
    """The dtype of the weights according to the file, one of WEIGHT_BITS."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        weights = {"fp8": "fp8", "fbgemm_fp8": "fp8"}.get(str(quantized.get("quant_method")))
        weights = weights or {"4": "int4", "8": "int8"}.get(str(quantized.get("bits")))
        if weights is None:
            message = "model: its quantization is not known: give --weight-dtype"
            raise InvalidArgumentError(message, field="weight_dtype")
        return weights
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A number of the file; `default` if the file has none, or 0."""
    value = config.get(name)
    if not value and default is not None:
        return default
    if value is None:
        raise InvalidArgumentError(f"model: {name} is not known: its config.json lacks it", field=name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise InvalidArgumentError(f"{name} must be a whole number of 1..{_MOST}, not {value!r}", field=name)
    return value
