"""The Triton kernels against attention written down plainly: compiled on a GPU, else run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import AttentionContext, LayerState
from engine.kv_pool import KvPool
from engine.runner import ScheduledSequence
from engine.types import SamplingParams
from kv_transfer.layout import KvLayout
from tests.support.runner_driver import check_halves, drive, make_sequences, prompt_of, runner_of, tokens_of
from tests.support.triton_interpreter import triton_interpreter

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BLOCK = 8
NUM_BLOCKS = 48
# Computed before, and now: decode rows and chunks at, before and after the end of a block, and a first token.
MIXED = [(0, BLOCK - 1), (BLOCK - 1, 1), (BLOCK, 1), (3, BLOCK + 3), (2 * BLOCK, 1), (0, 1)]
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with nullcontext() if DEVICE.type == "cuda" else triton_interpreter():
        yield
    torch.set_num_threads(threads)


@dataclass
class Rig:
    """A pool full of NaN but for the KV of some sequences, and new tokens of them."""

    pool: KvPool
    batch: list[ScheduledSequence]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def make(
        cls, steps: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Rig:
        layout = KvLayout("model", str(dtype).removeprefix("torch."), BLOCK, 2, kv_heads, head_dim)
        pool = KvPool(layout, NUM_BLOCKS, DEVICE)
        pool.tensor.fill_(float("nan"))
        numbers = torch.Generator().manual_seed(7)
        free = torch.randperm(NUM_BLOCKS, generator=numbers).tolist()

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=numbers).to(DEVICE, dtype)

        batch = []
        for index, (computed, new) in enumerate(steps):
            blocks = [free.pop() for _ in range(-(-(computed + new) // BLOCK))]
            for position in range(computed):
                place = pool.tensor[blocks[position // BLOCK], ..., position % BLOCK, :]
                place.copy_(random(2, 2, kv_heads, head_dim))
            tokens = [0] * (computed + new)
            batch.append(
                ScheduledSequence(str(index), tokens, 1, computed, new, blocks, True, SamplingParams())
            )
        total = sum(new for _, new in steps)
        # As a model passes them: heads beside each other in a token's row.
        query = random(total, heads, head_dim).transpose(0, 1)
        key, value = (random(total, kv_heads, head_dim).transpose(0, 1) for _ in range(2))
        return cls(pool, batch, query, key, value)

    def attend(self, window: int | None = None, softcap: float | None = None, layer: int = 1) -> torch.Tensor:
        """By the kernels, through the backend. Returns `[tokens, heads, head_dim]`."""
        from engine.cuda.step_inputs import Staging, flatten
        from engine.cuda.triton_backend import TritonBackend

        backend = TritonBackend(self.pool)
        backend.inputs = Staging(8, DEVICE).stage(flatten(self.batch, BLOCK))
        state = LayerState(layer, AttentionContext(), window, True)
        scale = self.query.shape[-1] ** -0.5
        return backend.attend(state, self.query, self.key, self.value, scale, softcap)

    def expected(
        self, window: int | None = None, softcap: float | None = None, layer: int = 1
    ) -> torch.Tensor:
        """In float64, one query after the other, from what is in the pool; rows in the kernels' order."""
        order = [s for s in self.batch if s.num_new == 1] + [s for s in self.batch if s.num_new != 1]
        group = self.query.shape[0] // self.key.shape[0]
        rows: list[torch.Tensor] = []
        for sequence in order:
            table = self.pool.tensor[list(sequence.block_ids), layer].double()
            keys, values = table.permute(1, 2, 0, 3, 4).flatten(2, 3).repeat_interleave(group, 1)
            for position in range(sequence.num_computed, sequence.num_computed + sequence.num_new):
                low = 0 if window is None else max(0, position + 1 - window)
                query = self.query[:, len(rows)].double()
                scores = torch.einsum("hd,hkd->hk", query, keys[:, low : position + 1])
                scores *= self.query.shape[-1] ** -0.5
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                weights = scores.softmax(-1)
                rows.append(torch.einsum("hk,hkd->hd", weights, values[:, low : position + 1]))
        return torch.stack(rows)

    def check(self, **kind: Any) -> None:
        """One equals the other."""
        found = self.attend(**kind).double()
        torch.testing.assert_close(
            found, self.expected(**kind), rtol=DTYPES[self.query.dtype], atol=DTYPES[self.query.dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (BLOCK, 3.0)])
def test_mixed_batches(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    Rig.make(MIXED, heads=6, kv_heads=2, head_dim=16, dtype=dtype).check(window=window, softcap=softcap)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 8), (5, 1, 20), (4, 2, 96), (18, 1, 16)])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    Rig.make([(9, 1), (2, 10)], heads, kv_heads, head_dim, torch.float32).check()


@pytest.mark.parametrize("window", [None, 70])
def test_chunks_of_several_tiles(window: int | None) -> None:
    """More queries than one tile has, and more keys, some of them from earlier steps."""
    Rig.make([(75, 45), (0, 37)], 4, 1, 16, torch.float32).check(window=window)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("splits", [8, 16])
def test_split_contexts(splits: int, window: int | None) -> None:
    """Contexts that need all parts, some, one, and none."""
    from engine.cuda.attention_tile import HeadShape
    from engine.cuda.decode_attention import KEYS, decode_attention
    from engine.cuda.kv_write import write_kv
    from engine.cuda.step_inputs import Staging, flatten

    rig = Rig.make([(230, 1), (KEYS - 1, 1), (KEYS, 1), (0, 1)], 4, 2, 16, torch.float32)
    inputs = Staging(8, DEVICE).stage(flatten(rig.batch, BLOCK).padded(6))
    padding = torch.full((2, 2, 16), float("nan"), device=DEVICE)
    rig.key, rig.value = (torch.cat([part, padding], 1) for part in (rig.key, rig.value))
    keys, values = rig.pool.view(1).unbind(0)
    before = rig.pool.tensor.clone()
    write_kv(rig.key, rig.value, keys, values, inputs.slots)
    changed = ~((before == rig.pool.tensor) | (before.isnan() & rig.pool.tensor.isnan()))
    assert changed[:, 1].sum() == changed.sum() == 4 * 2 * 2 * 16, "padded rows are written nowhere"
    query = torch.cat([rig.query, torch.zeros(4, 2, 16, device=DEVICE)], 1)
    output = torch.full((6, 4, 16), float("nan"), device=DEVICE)
    shape = HeadShape.of(4, 2, 16)
    decode_attention(
        query, keys, values, output, inputs, shape, 0.25, window, None, splits, least_tokens=KEYS
    )
    torch.testing.assert_close(output[:4].double(), rig.expected(window=window), rtol=2e-6, atol=2e-6)
    assert not output[4:].any(), "a row that sees nothing is zero"


def test_a_broken_key_reaches_its_own_sequence_only() -> None:
    rig = Rig.make([(12, 1), (13, 1), (3, 9)], 2, 1, 16, torch.float32)
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
    assert answers[0] == answers[1]
