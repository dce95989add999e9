"""The attention function that models call: registered with `transformers`, computed by a backend.

`transformers` calls `paged_attention` from every attention layer. Each layer's module has a `LayerState`, which refers
to its runner's `AttentionContext`. So there is no global state, and several runners can work in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from splitserve.errors import UnsupportedModelError

ATTENTION_NAME = "splitserve_paged"
"""Must not contain "flash", which `transformers` treats specially. No mask function is registered under this name, so
models create no masks and pass None."""

_LAYER_ATTRIBUTE = "splitserve_layer"
# Arguments that some model families pass and that do not affect attention here.
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


class NewTokens(NamedTuple):
    """What attention reads of a step's new tokens, in the model's dtype.

    query `[heads, tokens, head_dim]`, key and value `[kv_heads, tokens, head_dim]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def with_contiguous_rows(self) -> NewTokens:
        """The same tensors; one whose last dimension is not contiguous, in no known model family, is copied."""
        return NewTokens(*(part if part.stride(-1) == 1 else part.contiguous() for part in self))


class AttentionBackend(Protocol):
    """Computes attention of one layer for the current step."""

    def attend(
        self, layer: LayerState, tokens: NewTokens, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Writes the new tokens' KV, then attends to each sequence's KV up to each token, within the layer's window.

        With `softcap`, scores are softcap * tanh(score / softcap). Returns `[tokens, heads, head_dim]`.
        """


class AttentionContext:
    """Shared by the layers of one model. `backend` must be set before a forward pass."""

    backend: AttentionBackend


@dataclass(slots=True)
class LayerState:
    """One attention layer.

    `window`: the number of positions that a token sees, itself included; None for all up to it. `window_declared`:
    whether it is known already, from the configuration or from the layer's first call.
    """

    index: int
    context: AttentionContext
    window: int | None = None
    window_declared: bool = False

    def accept_window(self, passed: int | None) -> None:
        """Takes the window that the layer passes. Raises UnsupportedModelError if it differs from the declared one."""
        passed = passed or None  # some families write "no window" as 0
        if not self.window_declared:
            self.window, self.window_declared = passed, True
        elif passed is not None and passed != self.window:
            message = f"layer {self.index} passes a sliding window of {passed}, its configuration says {self.window}"
            raise UnsupportedModelError(message)


def bind_layers(
    model: torch.nn.Module, context: AttentionContext, windows: list[int | None] | None
) -> list[LayerState]:
    """Attaches a `LayerState` to every module that has a layer number; returns them in the order of layers.

    `windows` are the windows that the configuration declares for each layer; None if it declares none.
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
    """The function registered as `ATTENTION_NAME`; shapes are those of `transformers`, with batch size 1.

    query `[1, heads, tokens, head_dim]`, key and value `[1, kv_heads, tokens, head_dim]`; returns
    `[1, tokens, heads, head_dim]`. Raises UnsupportedModelError for anything but causal attention with an optional
    window and softcap.
    """
    layer = module.__dict__.get(_LAYER_ATTRIBUTE)
    if not isinstance(layer, LayerState):
        raise UnsupportedModelError(f"{type(module).__name__} computes attention without a layer number")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} computes its own attention mask")
    if is_causal is False or module.__dict__.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal (sees later tokens)")
    unknown = [name for name, value in options.items() if value is not None and name not in _HARMLESS]
    if unknown or dropout:
        what = ", ".join(unknown) or "dropout"
        raise UnsupportedModelError(f"{type(module).__name__} needs attention with {what}, unknown here")
    layer.accept_window(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = layer.context.backend.attend(layer, NewTokens(query[0], key[0], value[0]), scale, softcap)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
