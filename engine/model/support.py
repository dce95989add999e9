"""Decides by configuration and class, before weights are read, which models the engine supports.

What only a running model shows is checked by `engine.model.probe`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from splitserve.errors import UnsupportedModelError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_STATE_PREFIXES = ("mamba_", "ssm_", "linear_conv_", "linear_key_", "linear_value_", "lru_")
_STATE_KEYS = frozenset({"state_size", "conv_kernel", "conv_kernel_size", "conv_L_cache", "time_step_rank"})
# Settings for attention that the engine does not compute; any value but None, 0 and False is refused.
_REFUSED_SETTINGS = {
    "is_encoder_decoder": "it is an encoder-decoder",
    "add_cross_attention": "it has cross-attention",
    "kv_lora_rank": "it uses multi-head latent attention (MLA)",
    "num_kv_shared_layers": "some of its layers share their KV",
    "use_bidirectional_attention": "its attention is bidirectional",
    "attention_chunk_size": "its attention is chunked",
    "vision_config": "it is multimodal; only its text-only form can be served",
    "audio_config": "it is multimodal; only its text-only form can be served",
    "per_layer_config": "its layers differ in shape",
    "alibi": "it uses ALiBi position biases",
}
_UNIFORM = ("num_key_value_heads", "head_dim", "num_attention_heads")


def refuse_by_config(settings: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError, with the reason, for a model whose `config.to_dict()` rules it out."""
    for name, reason in _REFUSED_SETTINGS.items():
        if settings.get(name):
            raise unsupported(settings, f"{reason} ({name})")
    for name, value in settings.items():
        if value and (name in _STATE_KEYS or name.startswith(_STATE_PREFIXES)):
            raise unsupported(settings, f"it keeps a state beside the KV cache ({name})")
    for name in _UNIFORM:
        if isinstance(settings.get(name), (list, tuple)):
            raise unsupported(settings, f"{name} differs by layer")
    other = sorted(set(settings.get("layer_types") or ()) - _LAYER_TYPES)
    if other:
        raise unsupported(settings, f"it has layers of type {', '.join(other)}")
    if settings.get("global_head_dim") not in (None, settings.get("head_dim")):
        raise unsupported(settings, "head_dim differs by layer (global_head_dim)")


def unsupported(settings: Mapping[str, Any], reason: str) -> UnsupportedModelError:
    """The error for a model with these settings."""
    return UnsupportedModelError(f"model type {settings.get('model_type')} is not supported: {reason}")


def refuse_by_class(skeleton: Any) -> None:
    """Raises UnsupportedModelError for a model, with or without weights, whose class does not allow paged attention."""
    kind = type(skeleton)
    if kind._is_stateful:
        raise UnsupportedModelError(f"{kind.__name__} is not supported: it keeps a state beside the KV cache")
    if not kind.is_backend_compatible():
        reason = "its attention layers do not go through the attention interface"
        raise UnsupportedModelError(f"{kind.__name__} is not supported: {reason}")
    parameters = inspect.signature(kind.forward).parameters
    missing = {"position_ids", "logits_to_keep"} - set(parameters)
    if missing:
        reason = f"its forward pass takes no {', '.join(sorted(missing))}"
        raise UnsupportedModelError(f"{kind.__name__} is not supported: {reason}")


def declared_windows(settings: Mapping[str, Any]) -> list[int | None] | None:
    """The sliding window of each layer by the configuration; None if only the layers themselves know.

    With a window of w a token sees itself and the w - 1 tokens before it, as in `transformers.masking_utils`.
    """
    layer_types = settings.get("layer_types")
    if not layer_types:
        return None
    window = settings.get("sliding_window") or None
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def context_limit(settings: Mapping[str, Any]) -> int:
    """The maximum number of tokens of a sequence.

    With "dynamic" and "longrope" rotary embeddings the frequencies change at a certain length of the sequence, and keys
    cached before would not match queries after it. So the context ends there. Raises UnsupportedModelError if the
    configuration names no limit.
    """
    limit = settings.get("max_position_embeddings") or settings.get("n_positions")
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModelError(f"model type {settings.get('model_type')} declares no context length")
    rope = settings.get("rope_parameters") or {}
    groups = [rope] if "rope_type" in rope else [group for group in rope.values() if isinstance(group, dict)]
    for group in groups:
        kind = str(group.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            original = group.get("original_max_position_embeddings")
            original = original or settings.get("original_max_position_embeddings")
            limit = min(limit, int(original or limit))
    return limit
