"""bfloat16 to fp8 and back: the error for any content, and that only the given blocks are converted."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kv_cache.memory import KvCacheMemory, choose_num_blocks
from engine.runner.fp8_wire import Fp8Wire, dequantize, quantize
from kv_transfer.handoff.checksums import digests_of
from kv_transfer.layout import FP8_E4M3, SAME, KvLayout
from kv_transfer.wire_format import check_wire_dtype
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError

LAYOUT = KvLayout("f" * 64, "bfloat16", block_size_tokens=4, num_layers=2, num_kv_heads=3, head_dim=8)
WIRE = replace(LAYOUT, wire_dtype=FP8_E4M3)
CPU = torch.device("cpu")
RELATIVE_ERROR = 8 / 123
"""The worst case of half of e4m3's last bit (1/17) and three roundings to bfloat16 (of the reciprocal scale, of the
product with it, of the product with the scale), found by trying every largest element with every other one."""
LEAST_ERROR = 2.0**-18
"""Of the vector's largest element: half of e4m3's smallest number over its largest, 448, and a little."""
TINIEST = 2.0**-133
"""bfloat16's smallest number: a result below the normal numbers is rounded to a multiple of it."""

bits = st.integers(0, 2**16 - 1)


def a_round_trip(vectors: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(vectors), vectors.shape[-1])


def of_bits(values: list[int], head_dim: int) -> torch.Tensor:
    signed = [value - 2**16 if value >= 2**15 else value for value in values]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).view(1, -1, head_dim)


def check_round_trip(vectors: torch.Tensor) -> None:
    """`vectors` is bfloat16 `[blocks, vectors, head_dim]`."""
    result = a_round_trip(vectors)
    assert result.shape == vectors.shape
    assert result.dtype == torch.bfloat16
    before, after = vectors.double(), result.double()
    finite = before.isfinite().all(-1)
    assert bool(after[~finite].isnan().all())
    before, after = before[finite], after[finite]
    largest = before.abs().amax(-1, keepdim=True)
    allowed = torch.maximum(before.abs() * RELATIVE_ERROR, largest * LEAST_ERROR)
    off = ((before - after).abs() > allowed + TINIEST).any(-1)
    assert not bool(off.any()), (before[off][:3], after[off][:3])
    assert bool((before.sign() * after.sign() >= 0).all())


@settings(max_examples=300)
@given(
    st.sampled_from([1, 2, 3, 8]).flatmap(
        lambda d: st.tuples(st.just(d), st.lists(bits, min_size=6 * d, max_size=6 * d))
    )
)
@example((1, [32625] * 6))  # more than 448 times 2**119
def test_any_vector_is_close_to_itself_or_not_a_number(drawn: tuple[int, list[int]]) -> None:
    head_dim, values = drawn
    check_round_trip(of_bits(values, head_dim))


@pytest.mark.parametrize("exponent", [254, 253, 127, 30])
def test_the_bound_holds_for_every_largest_element_with_every_other(exponent: int) -> None:
    """An exponent changes nothing but at the ends, so these stand for all normal numbers of some size."""
    largest = torch.arange(exponent << 7, (exponent + 1) << 7, dtype=torch.int32)
    others = torch.arange((exponent - 20) << 7, (exponent + 1) << 7, dtype=torch.int32)
    pairs = torch.cartesian_prod(largest, others)
    pairs = pairs[pairs[:, 1] <= pairs[:, 0]]
    check_round_trip(pairs.to(torch.int16).view(torch.bfloat16).unsqueeze(0))


def test_zeros_stay_and_touch_no_other_vector() -> None:
    vectors = torch.zeros(2, 6, 8, dtype=torch.bfloat16)
    assert torch.equal(a_round_trip(vectors), vectors)
    vectors[1, 3] = 5.0
    vectors[0, 2, 1] = math.nan
    result = a_round_trip(vectors)
    assert bool(result[0, 2].isnan().all())
    others = torch.ones(2, 6, dtype=torch.bool)
    others[0, 2] = False
    assert torch.equal(result[others], vectors[others])


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_size_changes_the_scale_alone(power: int) -> None:
    torch.manual_seed(2)
    vectors = torch.randn(3, 5, 8).to(torch.bfloat16)
    scaled = (vectors.double() * 2.0**power).to(torch.bfloat16)
    assert torch.equal(quantize(vectors)[:, 10:], quantize(scaled)[:, 10:])
    assert torch.equal((a_round_trip(vectors).double() * 2.0**power).to(torch.bfloat16), a_round_trip(scaled))


def test_the_largest_element_is_almost_exact() -> None:
    torch.manual_seed(3)
    vectors = torch.randn(20, 50, 64).to(torch.bfloat16)
    before, place = vectors.double().abs().max(-1, keepdim=True)
    after = a_round_trip(vectors).double().abs().gather(-1, place)
    assert float(((before - after).abs() / before).max()) <= 2.0**-7


def test_every_code_means_what_torch_says() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    for scale in (2.0**-100, 0.37, 1.0, 3.0, 2.0**100):
        number = torch.tensor([scale], dtype=torch.bfloat16)
        block = torch.cat((number.view(torch.uint8), finite)).unsqueeze(0)
        expected = (finite.view(torch.float8_e4m3fn).double() * number.double()).to(torch.bfloat16)
        assert torch.equal(dequantize(block, len(finite))[0, 0], expected)


def a_wire(num_blocks: int = 40) -> tuple[KvCacheMemory, Fp8Wire]:
    pool = KvCacheMemory(LAYOUT, num_blocks, CPU)
    torch.manual_seed(1)
    pool.tensor.copy_(torch.randn(pool.tensor.shape) * 20)
    return pool, Fp8Wire(pool)


@pytest.mark.parametrize("blocks", [(), (7,), (0, 1, 2, 39), (30, 3, 4, 5, 20), tuple(range(40))])
def test_only_the_named_blocks_are_touched(blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.fp8_wire.PIECE_BYTES", 3 * LAYOUT.block_bytes)
    pool, wire = a_wire()
    before = pool.tensor.clone()
    wire.pack(blocks)
    assert torch.equal(pool.tensor, before)
    packed = [bool(memory.tobytes().strip(b"\0")) for memory in wire.read_blocks(range(40))]
    assert [block for block in range(40) if packed[block]] == sorted(blocks)
    pool.tensor.zero_()
    wire.unpack(blocks)
    for block in range(40):
        close = torch.isclose(
            pool.tensor[block].float(), before[block].float(), rtol=RELATIVE_ERROR, atol=1e-3
        )
        assert bool(close.all()) if block in blocks else not pool.tensor[block].any()


def test_packing_depends_on_nothing_but_the_block() -> None:
    pool, wire = a_wire()
    wire.pack(range(40))
    first = digests_of(wire.read_blocks(range(40)))
    wire.pack([5, 9, 6])
    assert digests_of(wire.read_blocks(range(40))) == first
    pool.tensor[3, :, :, :, 2:] = math.nan  # what an earlier request left behind the last token
    wire.pack([3])
    wire.unpack([3])
    assert bool(pool.tensor[3, :, :, :, :2].isfinite().all())


def test_the_registered_memory_is_the_wire_blocks() -> None:
    pool, wire = a_wire()
    wire.pack([17])
    memory = wire.memory
    assert memory.layout == WIRE
    assert WIRE.block_bytes == 2 * 2 * 3 * 4 * (2 + 8)
    assert memory.request_blocks == pool.num_blocks
    assert memory.probe_blocks >= 1
    there = ctypes.string_at(memory.base_address + 17 * WIRE.block_bytes, WIRE.block_bytes)
    assert there == wire.read_blocks([17])[0].tobytes()


def test_the_memory_that_is_asked_for_holds_both() -> None:
    config = EngineConfig(kv_memory_bytes=2**20)
    alone = choose_num_blocks(config, LAYOUT)
    both = choose_num_blocks(config, LAYOUT, WIRE.block_bytes)
    assert alone * LAYOUT.block_bytes <= 2**20
    assert 0 <= 2**20 - both * (LAYOUT.block_bytes + WIRE.block_bytes) < LAYOUT.block_bytes + WIRE.block_bytes


@pytest.mark.parametrize("kv_dtype", ["float32", "uint8"])
def test_only_bfloat16_is_sent_as_fp8(kv_dtype: str) -> None:
    check_wire_dtype(SAME, kv_dtype)
    check_wire_dtype(FP8_E4M3, "bfloat16")
    with pytest.raises(ConfigError, match=kv_dtype) as caught:
        check_wire_dtype(FP8_E4M3, kv_dtype)
    assert caught.value.field == "wire_dtype"


def test_it_is_off_by_default() -> None:
    assert WorkerConfig(worker_id="w", model="m").wire_dtype == SAME
