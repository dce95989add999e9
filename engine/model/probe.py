"""Runs a loaded model on a few tokens to find out how it uses attention, before anything depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from engine.model.attention_interface import AttentionBackend, AttentionContext, LayerState, NewTokens
from engine.model.support import unsupported
from splitserve.errors import UnsupportedModelError

_TOKENS = 3
_MAX_DIFFERENCE = 0.2
"""Relative norm. Rounding in bfloat16 stays far below; a token that sees another one's state does not."""


class AttentionKind(NamedTuple):
    """What layers differ in: query heads, sliding window, soft cap of the scores."""

    heads: int
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a token's KV, and the kinds of layers that attend to it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kinds: frozenset[AttentionKind]


@dataclass(slots=True)
class _SelfAttention(AttentionBackend):
    """Attention in which each token sees only itself; records the calls as (layer, kv_heads, head_dim)."""

    calls: list[tuple[int, int, int]] = field(default_factory=list)
    kinds: set[AttentionKind] = field(default_factory=set)

    @override
    def attend(
        self, layer: LayerState, tokens: NewTokens, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """With one visible token its weight is 1, so the output is the value."""
        query, key, value = tokens
        if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[0] % key.shape[0]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tokens)
            raise UnsupportedModelError(
                f"layer {layer.index} has queries, keys and values of shapes {shapes}"
            )
        self.calls.append((layer.index, key.shape[0], key.shape[-1]))
        self.kinds.add(AttentionKind(query.shape[0], layer.window, softcap))
        return value.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(0, 1)


def probe_model(
    model: Any, context: AttentionContext, layers: Sequence[LayerState], settings: Mapping[str, Any]
) -> AttentionShape:
    """Checks that tokens affect each other only through attention, and that its shape is uniform; returns the shape.

    Compares two forward passes in which attention is restricted to the token itself: one over three tokens, one over
    the middle token alone. They differ in a model that mixes tokens elsewhere (convolution, recurrent state). Raises
    UnsupportedModelError with the reason.
    """
    backend = context.backend = _SelfAttention()
    together = _logits(model, slice(None))[1].float()
    calls = list(backend.calls)
    alone = _logits(model, slice(1, 2))[0]
    if [index for index, _, _ in calls] != list(range(len(layers))) or not layers:
        raise unsupported(settings, f"{len(calls)} attention calls from {len(layers)} layers")
    if len({call[1:] for call in calls}) != 1:
        raise unsupported(settings, "KV heads differ by layer")
    if _window_lost(layers, settings):
        raise unsupported(settings, "a sliding window is configured, but its attention layers do not tell it")
    difference = torch.linalg.vector_norm(together - alone.float()) / torch.linalg.vector_norm(together)
    if not difference < _MAX_DIFFERENCE:
        raise unsupported(settings, "tokens influence each other outside of attention")
    return AttentionShape(len(layers), calls[0][1], calls[0][2], frozenset(backend.kinds))


def probe_logits(model: Any, context: AttentionContext) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of a few tokens, each of which sees only itself."""
    context.backend = _SelfAttention()
    return _logits(model, slice(None))


def _logits(model: Any, part: slice) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of a part of the tokens 1, 2, 3 at the positions 0, 1, 2."""
    device = next(model.parameters()).device
    tokens = torch.arange(1, _TOKENS + 1, device=device)[part].unsqueeze(0)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens, position_ids=tokens - 1, use_cache=False).logits[0]
    return logits


def _window_lost(layers: Sequence[LayerState], settings: Mapping[str, Any]) -> bool:
    """Whether a window is configured without naming layers, and no layer has passed it to attention."""
    configured = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    declared = settings.get("layer_types")
    return bool(configured) and not declared and all(layer.window is None for layer in layers)
