"""The Triton kernels against attention written down plainly: compiled on a GPU, else run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.attention_interface import LayerState, NewTokens
from tests.support.engine.attention_rig import BLOCK, NUM_BLOCKS, TOLERANCES, Rig
from tests.support.engine.runner_driver import (
    check_halves,
    check_prompt_logprobs,
    drive,
    make_sequences,
    prompt_of,
    runner_of,
    tokens_of,
)
from tests.support.engine.triton_interpreter import triton_interpreter

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# Computed before, and now: decode rows and chunks at, before and after the end of a block, and a first token.
MIXED = [(0, BLOCK - 1), (BLOCK - 1, 1), (BLOCK, 1), (3, BLOCK + 3), (2 * BLOCK, 1), (0, 1)]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with nullcontext() if DEVICE.type == "cuda" else triton_interpreter():
        yield
    torch.set_num_threads(threads)


def placed(rig: Rig) -> Any:
    """The rig's step in a table on the device."""
    from engine.backends.cuda.block_table import DeviceBlockTable
    from engine.backends.interface import flatten

    return DeviceBlockTable(len(rig.batch) + 1, NUM_BLOCKS, BLOCK, DEVICE).place(flatten(rig.batch))


def attend(rig: Rig, layer: LayerState, scale: float, softcap: float | None) -> torch.Tensor:
    """By the kernels, through the backend."""
    from engine.backends.cuda.staging import Staging
    from engine.backends.cuda.triton_attention import TritonAttention

    backend = TritonAttention(rig.pool)
    backend.inputs = Staging(8, DEVICE).stage(placed(rig))
    return backend.attend(layer, NewTokens(rig.query, rig.key, rig.value), scale, softcap)


def make_rig(
    steps: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Rig:
    return Rig.make(attend, steps, heads, kv_heads, head_dim, dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (BLOCK, 3.0)])
def test_mixed_batches(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    make_rig(MIXED, heads=6, kv_heads=2, head_dim=16, dtype=dtype).check(window=window, softcap=softcap)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 8), (5, 1, 20), (4, 2, 96), (18, 1, 16)])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    make_rig([(9, 1), (2, 10)], heads, kv_heads, head_dim, torch.float32).check()


@pytest.mark.parametrize("window", [None, 70])
def test_chunks_of_several_tiles(window: int | None) -> None:
    """More queries than one tile has, and more keys, some of them from earlier steps."""
    make_rig([(75, 45), (0, 37)], 4, 1, 16, torch.float32).check(window=window)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("splits", [8, 16])
def test_split_contexts(splits: int, window: int | None) -> None:
    """Contexts that need all parts, some, one, and none."""
    from engine.backends.cuda.attention_tile import HeadShape, KvViews
    from engine.backends.cuda.decode_attention import KEYS, decode_attention
    from engine.backends.cuda.staging import Staging
    from engine.backends.cuda.triton_attention import write_kv

    rig = make_rig([(230, 1), (KEYS - 1, 1), (KEYS, 1), (0, 1)], 4, 2, 16, torch.float32)
    inputs = Staging(8, DEVICE).stage(placed(rig).padded(6))
    padding = torch.full((2, 2, 16), float("nan"), device=DEVICE)
    rig.key, rig.value = (torch.cat([part, padding], 1) for part in (rig.key, rig.value))
    kv = KvViews.of(rig.pool, 1)
    before = rig.pool.tensor.clone()
    write_kv(rig.key, rig.value, kv, inputs.slots)
    changed = ~((before == rig.pool.tensor) | (before.isnan() & rig.pool.tensor.isnan()))
    assert changed[:, 1].sum() == changed.sum() == 4 * 2 * 2 * 16, "padded rows are written nowhere"
    query = torch.cat([rig.query, torch.zeros(4, 2, 16, device=DEVICE)], 1)
    output = torch.full((6, 4, 16), float("nan"), device=DEVICE)
    shape = HeadShape.of(4, 2, 16)
    decode_attention(query, kv, output, inputs, shape, 0.25, window, None, splits, min_tokens=KEYS)
    torch.testing.assert_close(output[:4].double(), rig.expected(window=window), rtol=2e-6, atol=2e-6)
    assert not output[4:].any(), "a row that sees nothing is zero"


def test_a_broken_key_reaches_its_own_sequence_only() -> None:
    rig = make_rig([(12, 1), (13, 1), (3, 9)], 2, 1, 16, torch.float32)
    rig.pool.tensor[rig.batch[1].block_ids[0], 1, 0] = float("nan")
    output = rig.attend()
    assert not torch.isfinite(output[1]).any()
    assert torch.isfinite(output[[0, *range(2, 11)]]).all()


def test_a_whole_model(tmp_path: Path) -> None:
    """The runner with this backend, chunks and single tokens mixed, equals the one in plain torch."""
    prompts = [prompt_of(13), prompt_of(6)]
    answers = []
    for backend in ("torch", "triton"):
        runner = runner_of(
            tmp_path, "mistral", device=str(DEVICE), attention_backend=backend, cuda_graphs="off"
        )
        runner._pool.tensor.fill_(float("nan"))
        answers.append(tokens_of(drive(runner, make_sequences(prompts, 2), 2, 9)))
        check_halves(runner)
        check_prompt_logprobs(runner, tmp_path, "mistral", [9], lengths=[3, 2, 12])
    assert answers[0] == answers[1]
