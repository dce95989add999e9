"""KV blocks in int8, in every backend: the same codes and scales, and attention over what they stand for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import pytest
import torch

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, attends, chunk_parts
from engine.backends.cpu.ops import Code
from engine.backends.interface import flatten
from engine.backends.torch_native.attention import TorchNativeAttention
from engine.backends.torch_native.batch import build_step_batch
from engine.kv_cache.int8_kv import dequantize, quantize
from engine.model.attention_interface import LayerState
from kv_transfer.layout import INT8, KvLayout
from tests.support.engine.attention_rig import Rig
from tests.support.engine.cpu_kernels import have_kernels, kernels_or_skip
from tests.support.engine.triton_interpreter import triton_interpreter

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 1024
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not have_kernels(), reason="no cpu kernels"))
TRITON = pytest.param(
    "triton", marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
)
BACKENDS = ["torch", CPU, TRITON]
"""Triton's kernels are interpreted here; `tests/contract/engine/test_triton_compiles.py` compiles them."""
# Computed before, and now. Of decode rows the longest comes first, as torch's backend orders them.
MIXED = [(0, 22), (97, 1), (48, 1), (47, 1), (16, 1), (3, 1), (0, 1), (3, 19), (46, 5), (97, 57)]


def by_torch(rig: Rig, layer: LayerState, scale: float, softcap: float | None) -> torch.Tensor:
    backend = TorchNativeAttention(rig.pool, 1 << 20)
    size = rig.pool.layout.block_size_tokens
    backend.batch = build_step_batch(
        rig.batch, size, torch.bfloat16, torch.device("cpu"), backend.group_blocks, backend.contiguous_kv
    )
    return backend.attend(layer, rig.query, rig.key, rig.value, scale, softcap)


def by_kernels(
    rig: Rig, layer: LayerState, scale: float, softcap: float | None, threads: int = 2
) -> torch.Tensor:
    block, count = rig.pool.layout.block_size_tokens, flatten(rig.batch).num_decode
    decoding = DecodeInputs(count, CONTEXT, block)
    decoding.fill(rig.order()[:count])
    backend = CpuAttention(rig.pool, kernels_or_skip()[threads])
    chunks = chunk_parts(rig.order()[count:], count, block)
    backend.parts = [*([Part(Code.ATTEND, 0, count, decoding)] if count else []), *chunks]
    return backend.attend(layer, rig.query, rig.key, rig.value, scale, softcap)


def by_triton(rig: Rig, layer: LayerState, scale: float, softcap: float | None) -> torch.Tensor:
    block, blocks = rig.pool.layout.block_size_tokens, rig.pool.num_blocks
    with triton_interpreter():
        from engine.backends.cuda.block_table import DeviceBlockTable
        from engine.backends.cuda.staging import Staging
        from engine.backends.cuda.triton_attention import TritonAttention

        backend, cpu = TritonAttention(rig.pool), torch.device("cpu")
        table = DeviceBlockTable(len(rig.batch) + 1, blocks, block, cpu)
        backend.inputs = Staging(8, cpu).stage(table.place(flatten(rig.batch)))
        return backend.attend(layer, rig.query, rig.key, rig.value, scale, softcap)


def make_rig(
    backend: str,
    steps: Sequence[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block: int = 16,
) -> Rig:
    compute = {"torch": by_torch, "cpu": by_kernels, "triton": by_triton}[backend]
    blocks = sum(-(-(before + new) // block) for before, new in steps) + 3
    return Rig.make(
        compute,
        steps,
        heads,
        kv_heads,
        head_dim,
        torch.bfloat16,
        block=block,
        num_blocks=blocks,
        kv_dtype=INT8,
    )


def check_with_pool(rig: Rig, window: int | None = None, softcap: float | None = None) -> None:
    """Results are right, the new tokens' KV lies in the pool bit for bit, and nothing else there has changed."""
    expected = rig.pool.bytes.clone()
    codes, scales = quantize(torch.stack((rig.key, rig.value)))
    rig.check(window=window, softcap=softcap)
    found, wanted = rig.pool.bytes.clone(), rig.pool.bytes.copy_(expected)
    assert rig.pool.scales is not None
    row, size = 0, rig.pool.layout.block_size_tokens
    for sequence in rig.order():
        for position in range(sequence.num_computed, sequence.num_computed + sequence.num_new):
            block, offset = sequence.block_ids[position // size], position % size
            rig.pool.tensor[block, 1, :, :, offset] = codes[:, :, row]
            rig.pool.scales[block, 1, :, :, offset] = scales[:, :, row]
            row += 1
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [3, 16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (50, 3.0)])
def test_mixed_batches(window: int | None, softcap: float | None, block: int, backend: str) -> None:
    check_with_pool(make_rig(backend, MIXED, block=block), window, softcap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (5, 1)])
@pytest.mark.parametrize("head_dim", [32, 96, 128, 256])
def test_shapes_of_heads(head_dim: int, heads: int, kv_heads: int, backend: str) -> None:
    check_with_pool(make_rig(backend, [(37, 1), (2, 10)], heads, kv_heads, head_dim))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_of_any_magnitude(backend: str) -> None:
    """Largest, smallest and zero keys and values have scales of their own; the others do not notice them."""
    rig = make_rig(backend, [(40, 1), (9, 1), (0, 9)])
    for row, factor in enumerate((1e20, 1e-30, 0.0, 1e-39)):
        rig.key[:, row] *= factor
        rig.value[:, row] *= factor
    codes, scales = quantize(torch.stack((rig.key, rig.value)))
    assert bool(dequantize(codes, scales).isfinite().all())
    rig.attend()
    assert rig.pool.scales is not None
    for row, sequence in enumerate(rig.order()[:2]):
        block, offset = sequence.block_ids[sequence.num_computed // 16], sequence.num_computed % 16
        assert torch.equal(rig.pool.tensor[block, 1, :, :, offset], codes[:, :, row])
        assert torch.equal(rig.pool.scales[block, 1, :, :, offset], scales[:, :, row])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("broken", ["key", "value", "query"])
def test_what_is_not_finite_reaches_its_own_sequence_only(broken: str, backend: str) -> None:
    steps = [(40, 1), (13, 1), (3, 9)]
    expected = make_rig(backend, steps).attend()
    rig = make_rig(backend, steps)
    vars(rig)[broken][:, 1, 7] = math.inf if broken == "key" else math.nan
    found = rig.attend()
    assert not found[1].isfinite().any()
    others = [0, *range(2, 11)]
    assert torch.equal(found[others], expected[others])
    # What is broken stays broken: the next step reads it from the pool.
    if broken != "query":
        assert rig.pool.scales is not None
        assert bool(
            rig.pool.scales[rig.order()[1].block_ids[0], 1, int(broken == "value"), :, 13].isnan().all()
        )


@pytest.mark.skipif(not have_kernels(), reason="no cpu kernels")
@pytest.mark.parametrize("window", [None, 21])
def test_a_result_depends_on_its_own_sequence_only(window: int | None) -> None:
    """Bit for bit: alone and among others, on one thread and on two, and, decoding, for any size of a block."""
    steps = [(70, 1), (50, 20), (8, 1), (0, 9)]
    whole = make_rig("cpu", steps).attend(window)
    assert torch.equal(whole[:2], make_rig("cpu", steps, block=5).attend(window)[:2])
    rig = make_rig("cpu", steps)
    rig.compute = lambda *given: by_kernels(*given, threads=1)
    assert torch.equal(whole, rig.attend(window))
    for name, span, alone in make_rig("cpu", steps).each_alone(window):
        assert torch.equal(alone, whole[span]), name


def test_layouts_of_the_kernels() -> None:
    assert attends(KvLayout("model", INT8, 8, 2, 2, 96))
    assert not attends(KvLayout("model", INT8, 8, 2, 2, 80))
