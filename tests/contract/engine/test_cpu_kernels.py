"""The cpu's kernels for layers against float64 and torch: linear layers, norms, and what goes element by element."""

from __future__ import annotations

import math

import pytest
import torch

from engine.backends.cpu import build
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import replace_linears
from engine.backends.cpu.ops import Binary, Code, NormKind, Unary, elementwise_op
from tests.support.engine.cpu_kernels import THREADS, kernels_or_skip

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = kernels_or_skip()
ROWS = [*range(1, 10), 16, 17, 24, 25, 33, 300]
NAN, INF = math.nan, math.inf
SERIAL_ELEMENTS = 16384
"""As in `src/op.hpp`."""
BINARY = {Binary.ADD: torch.add, Binary.SUB: torch.sub, Binary.MUL: torch.mul}


@pytest.fixture(params=THREADS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return KERNELS[request.param]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


# ---- linear layers


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("outputs", [16, 32, 48, 64, 112, 144])
@pytest.mark.parametrize("inputs", [2, 34, 96, 576])
def test_a_linear_layer_is_that_of_float64(
    kernels: CpuKernels, inputs: int, outputs: int, with_bias: bool
) -> None:
    weight, bias = random(outputs, inputs, seed=1), random(outputs, seed=2) if with_bias else None
    packed, x = kernels.pack(weight), random(max(ROWS), inputs)
    assert packed.shape == weight.shape
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    whole = kernels.linear(x, packed, bias)
    assert whole.dtype is torch.bfloat16
    # One rounding to bfloat16, and sums in float32 of terms that may cancel.
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=1e-5 * inputs)
    for rows in ROWS:
        some = kernels.linear(x[:rows], packed, bias)
        assert torch.equal(bits(some), bits(whole[:rows])), f"{rows} rows"
    last = kernels.linear(x[-1:], packed, bias)
    assert torch.equal(bits(last), bits(whole[-1:])), "a row does not depend on where in the batch it is"
    assert torch.equal(bits(whole), bits(KERNELS[1].linear(x, packed, bias))), "nor on the threads"


@pytest.mark.skipif(not build._processor_features() >= build.AMX, reason="no AMX")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (96, 80), (576, 960), (1536, 576)])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 65, 256, 257, 515])
def test_a_layer_with_tile_multipliers_is_that_without(
    inputs: int, outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same but for the order of sums."""
    dice = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=dice).bfloat16()
    weight = torch.randn(outputs, inputs, generator=dice).bfloat16()
    bias = torch.randn(outputs, generator=dice).bfloat16()
    monkeypatch.setattr(build, "_may_use_tiles", lambda: False)
    without = CpuKernels(1)
    packed = without.pack(weight)
    expected = without.linear(x, packed, bias)
    for kernels in KERNELS.values():
        given = kernels.linear(x, packed, bias)
        torch.testing.assert_close(given, expected, rtol=2**-7, atol=1e-5 * inputs)


def test_what_can_be_packed() -> None:
    packs = CpuKernels.packs
    assert packs(random(48, 34))
    assert not packs(random(48, 577)), "pairs of inputs"
    assert not packs(random(257, 32)), "whole vectors of outputs"
    assert not packs(random(48, 34).float())


def test_a_model_that_cannot_do_with_the_kernels_layers_is_put_back(kernels: CpuKernels) -> None:
    class Peeking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to(self.layer.weight.dtype))

    model, x = Peeking().eval(), random(1, 5, 32)
    original = model.layer
    with torch.inference_mode():
        assert not replace_linears(model, lambda: model(x), kernels)
    assert model.layer is original


def test_dimensions_and_strides_of_a_linear_layers_input(kernels: CpuKernels) -> None:
    weight = random(32, 64)
    packed, x = kernels.pack(weight), random(2, 64, 5)
    expected = kernels.linear(x.transpose(1, 2).contiguous().view(10, 64), packed, None)
    found = kernels.linear(x.transpose(1, 2), packed, None)
    assert found.shape == (2, 5, 32)
    assert torch.equal(found.view(10, 32), expected)
    wide = random(10, 128)
    half = kernels.linear(wide[:, 64:], packed, None)
    assert torch.equal(half, kernels.linear(wide[:, 64:].clone(), packed, None))
    sparse = kernels.pack(random(64, 32).T)
    assert torch.equal(
        kernels.linear(wide[:, :64], sparse, None),
        kernels.linear(wide[:, :64], kernels.pack(random(64, 32).T.contiguous()), None),
    )
    assert kernels.linear(x.new_empty(0, 64), packed, None).shape == (0, 32)


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("rows", [3, 8, 20])
def test_a_broken_row_stays_alone(kernels: CpuKernels, rows: int, broken: float) -> None:
    weight, x = random(112, 96), random(rows, 96, seed=3)
    packed = kernels.pack(weight)
    whole = kernels.linear(x, packed, None)
    x[1, 5] = broken
    found = kernels.linear(x, packed, None)
    assert not torch.isfinite(found[1]).any()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], whole[others])


# ---- norms


@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 64), (15, 576), (16, 576), (200, 96)])
def test_norms(kernels: CpuKernels, kind: NormKind, rows: int, width: int) -> None:
    x, weight, epsilon = random(rows, width) * 3, random(width, seed=1), 1e-5
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    late = (normed * (1 + weight.float())).bfloat16()
    expected = normed.bfloat16() * weight if kind is NormKind.ROUNDED else late
    found = kernels.rms_norm(x, weight, kind, epsilon)
    # Sums are made in another order: now and then a value is rounded to its other neighbour, before or after.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)
    assert (found == expected).float().mean() > 0.98
    for row in {0, rows // 2, rows - 1}:
        alone = kernels.rms_norm(x[row : row + 1], weight, kind, epsilon)
        assert torch.equal(bits(alone), bits(found[row : row + 1]))


def test_a_norm_of_other_shapes_and_of_broken_rows(kernels: CpuKernels) -> None:
    weight, x = random(32), random(5, 32, 4)
    rows = x.transpose(1, 2)
    found = kernels.rms_norm(rows, weight, NormKind.ROUNDED, 1e-6)
    assert found.shape == rows.shape
    assert torch.equal(found, kernels.rms_norm(rows.contiguous(), weight, NormKind.ROUNDED, 1e-6))
    x[2, 7, 1] = NAN
    broken = kernels.rms_norm(rows, weight, NormKind.ROUNDED, 1e-6)
    assert broken[2, 1].isnan().all()
    broken[2, 1] = found[2, 1]
    assert torch.equal(broken, found)
    nothing = kernels.rms_norm(torch.zeros(2, 32).bfloat16(), weight, NormKind.ONE_PLUS, 1e-6)
    assert not nothing.any()


# ---- element by element


def compute(
    kernels: CpuKernels, code: Code, which: Binary | Unary, y: torch.Tensor, *inputs: torch.Tensor
) -> torch.Tensor:
    op = elementwise_op(code, which, y, *inputs)
    assert op is not None
    kernels.run(op)
    return y


@pytest.mark.parametrize(
    "shapes",
    [
        *(((n,), (n,)) for n in (1, 15, 16, 17, 32, 47)),
        ((3, 40), (40,)),
        ((40,), (3, 40)),
        ((3, 40), (3, 1)),
        ((), (2, 17)),
        ((2, 3, 4, 17), (3, 1, 17)),
        ((0, 16), (16,)),
        ((65, SERIAL_ELEMENTS // 64), (1,)),
        ((65, SERIAL_ELEMENTS // 64), (65, SERIAL_ELEMENTS // 64)),
    ],
    ids=str,
)
def test_two_tensors(kernels: CpuKernels, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = random(*shapes[0]), random(*shapes[1], seed=1)
    for which, function in BINARY.items():
        expected = function(a, b)
        found = compute(kernels, Code.BINARY, which, torch.full_like(expected, NAN), a, b)
        assert torch.equal(bits(found), bits(expected)), which


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_strides(kernels: CpuKernels, order: tuple[int, int, int]) -> None:
    a, b = random(5, 18, 33), random(5, 18, 33, seed=1)
    y = torch.zeros(5, 18, 33).bfloat16()
    for which, function in BINARY.items():
        found = compute(kernels, Code.BINARY, which, y.permute(order), a.permute(order), b.permute(order))
        assert torch.equal(found, function(a, b).permute(order))
    part = compute(kernels, Code.BINARY, Binary.ADD, y[:, ::2, 1:], a[:, ::2, 1:], b[:, 1::2, :-1])
    assert torch.equal(part, a[:, ::2, 1:] + b[:, 1::2, :-1])
    assert torch.equal(y[:, 1::2], (a * b)[:, 1::2]), "nothing beside is written"
    mixed = torch.empty(a.permute(order).shape).bfloat16()
    for unary, source in ((Unary.COPY, a), (Unary.NEG, -a)):
        found = compute(kernels, Code.UNARY, unary, mixed, source.permute(order))
        assert torch.equal(found, a.permute(order))


def test_more_than_four_dimensions_are_not_for_the_kernels() -> None:
    five = torch.zeros(1, 1, 1, 1, 2).bfloat16()
    assert elementwise_op(Code.UNARY, Unary.COPY, five, five) is None


@pytest.mark.parametrize("stride", [1, 3])
def test_silu(kernels: CpuKernels, stride: int) -> None:
    """Every number that bfloat16 has but the subnormal ones, in whole vectors and one by one."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = every[torch.isfinite(every) & ((every == 0) | (every.abs() > 2.0**-126))]
    place = torch.zeros(len(x) * stride).bfloat16()[::stride]
    found = compute(kernels, Code.UNARY, Unary.SILU, place, x).double()
    wide = x.double()
    torch.testing.assert_close(found, wide * torch.sigmoid(wide), rtol=2**-8, atol=2.0**-120)
    special = torch.tensor([NAN, INF, -INF] * 6).bfloat16()
    found = compute(kernels, Code.UNARY, Unary.SILU, place[: len(special)], special)
    torch.testing.assert_close(found, torch.nn.functional.silu(special), equal_nan=True)


def test_what_is_not_finite_stays_where_it_is(kernels: CpuKernels) -> None:
    a = random(4, 40)
    b = a.clone()
    a[1, 3], a[2, 20], b[2, 20], a[3, 39] = NAN, INF, INF, -INF
    for which, function in BINARY.items():
        found = compute(kernels, Code.BINARY, which, torch.empty_like(a), a, b)
        torch.testing.assert_close(found, function(a, b), rtol=0, atol=0, equal_nan=True)
    for unary, expected in ((Unary.COPY, a), (Unary.NEG, -a)):
        found = compute(kernels, Code.UNARY, unary, torch.empty_like(a), a)
        assert torch.equal(bits(found), bits(expected))
