"""The cpu's attention kernels, through their backend, against attention written down plainly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, attends, chunk_parts
from engine.backends.cpu.ops import Code
from engine.backends.interface import flatten
from engine.model.attention_interface import LayerState, NewTokens
from kv_transfer.layout import KvLayout
from tests.support.engine.attention_rig import Rig
from tests.support.engine.cpu_kernels import THREADS, kernels_or_skip

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = kernels_or_skip()
KEYS = 48  # of a panel
CONTEXT = 1024
NAN = math.nan


def attend(
    rig: Rig, layer: LayerState, scale: float, softcap: float | None, *, threads: int, padding: int = 0
) -> torch.Tensor:
    """Through the backend; between decode rows and chunks there are `padding` unused rows."""
    block = rig.pool.layout.block_size_tokens
    flat = flatten(rig.batch)
    count = flat.num_decode
    decoding = DecodeInputs(count + padding, CONTEXT, block)
    decoding.fill(rig.order()[:count])
    backend = CpuAttention(rig.pool, KERNELS[threads])
    chunks = chunk_parts(rig.order()[count:], count + padding, block)
    backend.parts = [Part(Code.ATTEND, 0, count + padding, decoding), *chunks]

    def padded(rows: torch.Tensor) -> torch.Tensor:
        nothing = torch.full_like(rows[:, :1], NAN).expand(-1, padding, -1)
        return torch.cat([rows[:, :count], nothing, rows[:, count:]], 1) if padding else rows

    tokens = NewTokens(*(padded(rows) for rows in (rig.query, rig.key, rig.value)))
    return backend.attend(layer, tokens, scale, softcap)


def make_rig(
    steps: Sequence[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    *,
    block: int = 8,
    threads: int = 1,
    padding: int = 0,
) -> Rig:
    blocks = sum(-(-(before + new) // block) for before, new in steps) + 3
    compute = partial(attend, threads=threads, padding=padding)
    return Rig.make(compute, steps, heads, kv_heads, head_dim, torch.bfloat16, block=block, num_blocks=blocks)


def mixed(block: int) -> list[tuple[int, int]]:
    """Decode rows and chunks at, before and after the end of a block and of a panel, and a first token."""
    decode = [(block - 1, 1), (block, 1), (2 * block, 1), (0, 1), (KEYS - 1, 1), (KEYS, 1)]
    return [(0, block + 6), *decode, (3, block + 3), (KEYS - 2, 5), (KEYS, 2), (2 * KEYS + 1, KEYS + 9)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def check_with_pool(rig: Rig, window: int | None = None, softcap: float | None = None) -> None:
    """Results are right, the new tokens' KV lies in the pool bit for bit, and nothing else there has changed."""
    expected = rig.pool.tensor.clone()
    row, size = 0, rig.pool.layout.block_size_tokens
    for sequence in rig.order():
        for position in range(sequence.num_computed, sequence.num_computed + sequence.num_new):
            place = expected[sequence.block_ids[position // size], 1, :, :, position % size]
            place.copy_(torch.stack((rig.key[:, row], rig.value[:, row])))
            row += 1
    rig.check(window=window, softcap=softcap)
    assert torch.equal(bits(rig.pool.tensor), bits(expected))


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("block", [1, 3, 8, 16, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (KEYS + 2, 3.0)])
def test_mixed_batches(window: int | None, softcap: float | None, block: int, threads: int) -> None:
    check_with_pool(make_rig(mixed(block), block=block, threads=threads), window, softcap)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 2), (4, 1), (5, 1), (9, 1), (36, 2)]
)
def test_numbers_of_heads(heads: int, kv_heads: int, threads: int) -> None:
    make_rig([(37, 1), (2, 10), (9, 1)], heads, kv_heads, 32, threads=threads).check()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
def test_sizes_of_heads(head_dim: int, threads: int) -> None:
    rig = make_rig([(37, 1), (2, 10), (70, 30), (0, 1)], 6, 2, head_dim, threads=threads)
    check_with_pool(rig)


def test_layouts() -> None:
    def fits(dtype: str, head_dim: int) -> bool:
        return attends(KvLayout("model", dtype, 8, 2, 2, head_dim))

    assert fits("bfloat16", 32)
    assert fits("bfloat16", 160)
    assert not fits("bfloat16", 80)
    assert not fits("float32", 64)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("window", [None, 150])
def test_long_contexts(window: int | None, threads: int) -> None:
    rig = make_rig([(700, 1), (690, 1), (3, 1), (640, 60), (0, 300)], block=16, threads=threads)
    check_with_pool(rig, window)


@pytest.mark.parametrize("threads", THREADS)
def test_padding_reads_and_writes_nothing(threads: int) -> None:
    rig = make_rig([(20, 1), (9, 12), (7, 1)], threads=threads, padding=3)
    alone = make_rig([(20, 1), (9, 12), (7, 1)], threads=threads)
    found, expected = rig.attend(), alone.attend()
    assert not bits(found[2:5]).any(), "padding is zero, whatever its query, key and value are"
    assert torch.equal(found[[0, 1, *range(5, 17)]], expected)
    assert torch.equal(bits(rig.pool.tensor), bits(alone.pool.tensor))


@pytest.mark.parametrize("window", [None, 21])
def test_a_result_depends_on_its_own_sequence_only(window: int | None) -> None:
    """Bit for bit: alone and among others, on one thread and on two, and, decoding, for any size of a block."""
    steps = [(70, 1), (50, 20), (8, 1), (0, 9)]
    whole = make_rig(steps, 6, 2).attend(window)
    assert torch.equal(whole, make_rig(steps, 6, 2, threads=2).attend(window))
    assert torch.equal(whole[:2], make_rig(steps, 6, 2, block=3).attend(window)[:2])
    for name, span, alone in make_rig(steps, 6, 2).each_alone(window):
        assert torch.equal(alone, whole[span]), name


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("broken", [1, 3])
def test_what_is_broken_reaches_its_own_sequence_only(broken: int, part: int, threads: int) -> None:
    """A NaN in a key or value of one sequence."""
    steps = [(12, 1), (13, 1), (3, 9), (60, 5)]
    rows = [range(1), range(1, 2), range(2, 11), range(11, 16)]
    expected = make_rig(steps, 2, 1, threads=threads).attend()
    rig = make_rig(steps, 2, 1, threads=threads)
    rig.pool.tensor[rig.batch[broken].block_ids[0], 1, part] = NAN
    found = rig.attend()
    assert not torch.isfinite(found[rows[broken]]).any()
    others = [row for index, span in enumerate(rows) if index != broken for row in span]
    assert torch.equal(found[others], expected[others])


def test_what_is_broken_before_the_window_is_not_seen() -> None:
    rig = make_rig([(40, 1)])
    expected = make_rig([(40, 1)]).attend(10)
    rig.pool.tensor[rig.batch[0].block_ids[0]] = NAN
    assert torch.equal(rig.attend(10), expected)


def test_tensors_in_any_order_in_memory() -> None:
    rig, other = make_rig([(12, 1), (3, 9)]), make_rig([(12, 1), (3, 9)])
    for name in ("query", "key", "value"):
        rows = vars(rig)[name]
        setattr(rig, name, rows.transpose(1, 2).contiguous().transpose(1, 2))
    assert rig.query.stride(-1) != 1
    assert torch.equal(rig.attend(), other.attend())
