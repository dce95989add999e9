"""Attention over the paged pool against plain attention, however the rows of a step are grouped."""

from __future__ import annotations

import random

import pytest
import torch

from engine.backends.torch_native.attention import FUSED_POSITIONS, TorchNativeAttention
from engine.backends.torch_native.batch import TILE_TOKENS, build_step_batch
from engine.core.model_runner import SamplingParams, ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import AttentionContext, LayerState, NewTokens
from kv_transfer.layout import KvLayout

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 24, 4
NUM_BLOCKS = 800
SCALE = HEAD_DIM**-0.5
LENGTHS = [
    (0, 1),
    (1, 1),
    (BLOCK, 1),
    (37, 1),
    (400, 1),
    (411, 1),
    (0, 5),
    (9, TILE_TOKENS + 3),
    (0, 2 * TILE_TOKENS),
]
"""(computed, new) of the sequences of one step; together more keys than fused attention is used for."""


def sequences(lengths: list[tuple[int, int]]) -> list[ScheduledSequence]:
    blocks = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(blocks)
    found = []
    for number, (computed, new) in enumerate(lengths):
        count = -(-(computed + new) // BLOCK)
        found.append(
            ScheduledSequence(
                request_id=str(number),
                token_ids=[0] * (computed + new),
                prompt_tokens=1,
                num_computed=computed,
                num_new=new,
                block_ids=[blocks.pop() for _ in range(count)],
                sample=True,
                sampling=SamplingParams(),
            )
        )
    return found


def plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """The last query rows `[heads, new, head_dim]` of a sequence against all its keys `[kv_heads, total, head_dim]`."""
    new, total = query.shape[1], keys.shape[1]
    keys, values = (kv.repeat_interleave(HEADS // KV_HEADS, dim=0).double() for kv in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(total - new, total)[:, None] - torch.arange(total)[None]
    hidden = (behind < 0) | (behind >= (window or total))
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ values


@pytest.mark.parametrize("group_blocks", [None, 1, 150])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (None, 2.0), (30, 2.0)])
def test_every_row_sees_its_own_past(
    group_blocks: int | None, window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(0)
    layout = KvLayout("m" * 64, "float32", BLOCK, 2, KV_HEADS, HEAD_DIM)
    pool = KvCacheMemory(layout, NUM_BLOCKS, torch.device("cpu"))
    pool.tensor.fill_(float("nan"))  # what others left there must not get through
    batch = sequences(LENGTHS)
    assert KV_HEADS * sum(computed + new for computed, new in LENGTHS if new == 1) > FUSED_POSITIONS
    backend = TorchNativeAttention(pool)
    pasts = {}
    for sequence in batch:
        past = pasts[sequence.request_id] = torch.randn(2, KV_HEADS, sequence.num_computed, HEAD_DIM)
        for position in range(sequence.num_computed):
            block = sequence.block_ids[position // BLOCK]
            pool.tensor[block, 1, :, :, position % BLOCK] = past[:, :, position]
    step = build_step_batch(batch, BLOCK, torch.float32, torch.device("cpu"), group_blocks)
    backend.batch = step
    total = step.positions.shape[1]
    query = torch.randn(HEADS, total, HEAD_DIM)
    key, value = torch.randn(2, KV_HEADS, total, HEAD_DIM)
    # The order of a step's rows is not specified: a sequence's rows are found by its blocks.
    owner = {block: sequence for sequence in batch for block in sequence.block_ids}
    rows: dict[str, list[int]] = {sequence.request_id: [] for sequence in batch}
    for row, block in enumerate(step.slot_blocks.tolist()):
        rows[owner[block].request_id].append(row)
    layer = LayerState(1, AttentionContext(), window, window_declared=True)
    output = backend.attend(layer, NewTokens(query, key, value), SCALE, softcap)

    for sequence in batch:
        own = rows[sequence.request_id]
        assert len(own) == sequence.num_new
        keys, values = torch.cat([pasts[sequence.request_id], torch.stack([key, value])[:, :, own]], dim=2)
        expected = plain(query[:, own], keys, values, window, softcap).transpose(0, 1)
        assert torch.allclose(output[own].double(), expected, atol=1e-5), sequence.request_id
    plan = step.plan(window)
    if group_blocks == 1:
        assert len(plan.decode) == sum(new == 1 for _, new in LENGTHS)
