"""The attention function that models call: registered with `transformers`, computed by a backend.

`transformers` calls `paged_attention` from every attention layer. What belongs to one layer hangs off its
module as a `LayerState`; what belongs to one runner is its `AttentionContext`, reachable from there. So
there is no global state, and two runners can work side by side in a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from splitserve.errors import UnsupportedModelError

ATTENTION_NAME = "splitserve_paged"
"""Must not contain "flash", which `transformers` treats in its own way. No mask function is registered under
this name, so models make no masks and pass None."""

_LAYER_ATTRIBUTE = "splitserve_layer"
# Arguments that some families hand through and that do not change what attention computes here.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


class AttentionBackend(Protocol):
    """Computes attention of one layer for the current step."""

    def attend(
        self,
        layer: LayerState,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """query `[heads, tokens, head_dim]`, key and value `[kv_heads, tokens, head_dim]` of the new tokens.

        Returns `[tokens, heads, head_dim]`.
        """


class AttentionContext:
    """What the layers of one model share. `backend` is set before each forward pass needs it."""

    backend: AttentionBackend


@dataclass(slots=True)
class LayerState:
    """One attention layer.

    `window`: how many positions a token sees, itself included; None for all before it. With
    `window_declared` the configuration said so; otherwise the layer's first call does.
    """

    index: int
    context: AttentionContext
    window: int | None = None
    window_declared: bool = False

    def accept_window(self, given: int | None) -> None:
        """Takes the window that the layer passes. Raises UnsupportedModelError if it contradicts."""
        given = given or None  # some families write "no window" as 0
        if not self.window_declared:
            self.window, self.window_declared = given, True
        elif given is not None and given != self.window:
            message = (
                f"layer {self.index} passes a sliding window of {given}, its configuration says {self.window}"
            )
            raise UnsupportedModelError(message)


def bind_layers(
    model: torch.nn.Module, context: AttentionContext, windows: list[int | None] | None
) -> list[LayerState]:
    """Hangs a `LayerState` off every module that has a layer number; returns one a layer, in order.

    `windows` is what the configuration declares for each layer, None where it declares nothing.
    """
    layers: dict[int, LayerState] = {}
    for module in model.modules():
        index = module.__dict__.get("layer_idx")
        if not isinstance(index, int):
            continue
        if index not in layers:
            declared = windows is not None and index < len(windows)
            window = windows[index] if windows is not None and declared else None
            layers[index] = LayerState(index, context, window, declared)
        setattr(module, _LAYER_ATTRIBUTE, layers[index])
    return [layers[index] for index in sorted(layers)]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind `ATTENTION_NAME`; shapes as `transformers` passes them, batch size 1.

    query `[1, heads, tokens, head_dim]`, key and value `[1, kv_heads, tokens, head_dim]`; returns
    `[1, tokens, heads, head_dim]`. Raises UnsupportedModelError for anything that asks for other
    mathematics than causal, optionally windowed and soft-capped, attention.
    """
    layer = module.__dict__.get(_LAYER_ATTRIBUTE)
    if not isinstance(layer, LayerState):
        raise UnsupportedModelError(f"{type(module).__name__} computes attention without a layer number")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} computes its own attention mask")
    if is_causal is False or module.__dict__.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal (sees later tokens)")
    unknown = [name for name, given in options.items() if given is not None and name not in _HARMLESS]
    if unknown or dropout:
        what = ", ".join(unknown) or "dropout"
        raise UnsupportedModelError(f"{type(module).__name__} needs attention with {what}, unknown here")
    layer.accept_window(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = layer.context.backend.attend(layer, query[0], key[0], value[0], scale, softcap)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
