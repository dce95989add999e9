"""Attention over the paged pool against plain attention, in steps of decodes and chunks of all lengths."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch_native.attention import TorchNativeAttention
from engine.backends.torch_native.batch import TILE_TOKENS, build_step_batch
from engine.model.attention_interface import LayerState, NewTokens
from tests.support.engine.attention_rig import BLOCK, Rig

STEPS = [(0, 1), (1, 1), (BLOCK, 1), (37, 1), (120, 1), (0, 5), (9, TILE_TOKENS + 3), (0, 2 * TILE_TOKENS)]


def attend(rig: Rig, layer: LayerState, scale: float, softcap: float | None) -> torch.Tensor:
    backend = TorchNativeAttention(rig.pool)
    backend.batch = build_step_batch(rig.batch, BLOCK, rig.query.dtype, rig.pool.device)
    return backend.attend(layer, NewTokens(rig.query, rig.key, rig.value), scale, softcap)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (None, 2.0), (30, 2.0)])
def test_every_row_sees_its_own_past(window: int | None, softcap: float | None) -> None:
    rig = Rig.make(attend, STEPS, 6, 2, 24, torch.float32, num_blocks=100)
    rig.check(window=window, softcap=softcap)
    together = rig.attend(window)
    for name, span, alone in rig.each_alone(window):
        assert torch.equal(alone, together[span]), name
