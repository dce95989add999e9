"""Graphs of small functions, replayed on other inputs, compute what the functions compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from engine.backends.cpu.graphs.capture import CpuGraph, GraphCapture, GraphCaptureError, MemoryPlanner
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import NormKind
from tests.support.engine.cpu_kernels import THREADS, count_ops, kernels_or_skip

KERNELS = kernels_or_skip()
SHAPE = (3, 4, 32)
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def inference(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def planner() -> MemoryPlanner:
    """The memory of the graphs; must live as long as they."""
    return MemoryPlanner()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).bfloat16()


def record(function: Function, x: torch.Tensor, planner: MemoryPlanner) -> CpuGraph:
    with GraphCapture(KERNELS[1]) as capture:
        output = function(x)
    assert KERNELS[1].record is None
    return capture.graph(output, planner)


def replay(graph: CpuGraph, kernels: CpuKernels) -> None:
    for part in graph.parts:
        if isinstance(part, np.ndarray):
            kernels.run(part)
        else:
            part()


def check(function: Function, graph: CpuGraph, x: torch.Tensor, kernels: CpuKernels = KERNELS[1]) -> None:
    """Compares on several inputs, written to the memory that the graph was captured with."""
    for seed in range(5, 8):
        x.copy_(random(seed, *x.shape))
        replay(graph, kernels)
        torch.testing.assert_close(graph.output, function(x), rtol=0, atol=0, equal_nan=True)


WEIGHT = random(90, 48, 32)
PACKED, NORM, BIAS = KERNELS[1].pack(WEIGHT), random(91, 32), random(92, 48)
MASK = random(93, 4, 1) > 0


def kernel_layers(x: torch.Tensor) -> torch.Tensor:
    normed = KERNELS[1].rms_norm(x, NORM, NormKind.ROUNDED, 1e-6)
    gate, up = KERNELS[1].linear(normed, PACKED, BIAS).split([16, 32], dim=-1)
    return x + up * nn.functional.silu(gate).repeat(1, 1, 2)


def many_layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x + kernel_layers(x) * 0.5
    return x


def rotate(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * x.cos() + torch.cat((-second, first), dim=-1) * x.sin()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    y[:, 1] = x[:, 0]
    y[..., 3:5].add_(x[..., 5:7]).mul_(2)
    y += x
    return y - x


def written_afterwards(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    z = x + x
    y.copy_(z)
    z.zero_()
    return y - z


def scattered(x: torch.Tensor) -> torch.Tensor:
    pool = torch.zeros(10, 4, 32, dtype=x.dtype)
    pool[torch.tensor([7, 2, 5])] = x
    return pool.index_select(0, torch.tensor([2, 9, 7]))


def constants(x: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor(1.5, dtype=torch.bfloat16)
    row = torch.tensor([0.25] * 32).bfloat16()
    return x * scale + row + torch.arange(32, dtype=torch.bfloat16) + torch.full((4, 1), 2.0).bfloat16()


def several_results(x: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(x, 5, dim=-1)
    largest, where = x.max(dim=-1, keepdim=True)
    return values + indices.bfloat16() + largest * where


def experts(x: torch.Tensor) -> torch.Tensor:
    scores, chosen = torch.topk(x[..., :8].float().softmax(-1), 2)
    return (x[..., None, :] * scores[..., None]).sum(-2).bfloat16() + chosen.sum(-1, keepdim=True)


def oneself(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    return y + y * y


FUNCTIONS: dict[str, Function] = {
    "kernel_layers": kernel_layers,
    "many_layers": many_layers,
    "rotate": rotate,
    "in_place": in_place,
    "written_afterwards": written_afterwards,
    "scattered": scattered,
    "constants": constants,
    "several_results": several_results,
    "experts": experts,
    "oneself": oneself,
    "other_dtypes": lambda x: (x.float().square().mean(-1, keepdim=True).rsqrt() * x.float()).bfloat16() + x,
    "float32_out": lambda x: (x + x).float() / 3,
    "numbers": lambda x: 1 - (x + 2) * 0.5,
    "alpha": lambda x: torch.add(x, x * x, alpha=3),
    "broadcast": lambda x: (x[:, :1] * x[..., :1] - x[0]) + x[0, 0],
    "transposed": lambda x: (x.transpose(0, 2) * 2 + x.permute(2, 1, 0)).reshape(32, -1).t(),
    "copies": lambda x: x.transpose(0, 1).contiguous().clone() + x.transpose(0, 1).reshape(4, 3, 32),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1).reshape(12, 32) + x.view(12, 32),
    "cat": lambda x: torch.cat([x[:, :1], x, -x[:, 2:]], dim=1),
    "cat_last": lambda x: torch.cat([x, x * x, x[..., :3]], dim=-1),
    "cat_nothing": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x, x[:0]], dim=0),
    "cat_mixed": lambda x: torch.cat([x.float(), x], dim=0),
    "five_dimensions": lambda x: (x[:, :, None, None] * x[..., None, None, :]).transpose(0, 4).clone(),
    "indexed": lambda x: x[:, (x[0, :, 0] > 0).long(), :] + x[torch.tensor([2])],
    "masked": lambda x: torch.where(MASK, x, -x).masked_fill(~MASK, 1.0),
    "not_finite": lambda x: (x / (x * 0))[:, :2] + 1,
    "nothing": lambda x: (x + x)[:, :0] - x[:, :0],
    "the_input": lambda x: x[1],
    "a_view": lambda x: (x + x).view(12, 32)[1:5, ::2],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_computes_what_the_function_computes(name: str, planner: MemoryPlanner) -> None:
    x = random(0)
    graph = record(FUNCTIONS[name], x, planner)
    check(FUNCTIONS[name], graph, x)


def test_graphs_share_memory(planner: MemoryPlanner) -> None:
    """They are replayed one after the other."""
    captured = []
    for name, function in FUNCTIONS.items():
        x = random(1)
        captured.append((name, function, x, record(function, x, planner)))
    for _ in range(2):
        for _, function, x, graph in captured:
            check(function, graph, x)
    assert len(planner._chunks) < len(captured)


@pytest.mark.parametrize("threads", THREADS)
def test_operations_with_kernels_need_no_calls(threads: int, planner: MemoryPlanner) -> None:
    x = random(0, 64, 4, 32)  # some of it large enough for all threads
    graph = record(many_layers, x, planner)
    ops, calls = count_ops(graph)
    assert ops > 6 * 5
    assert calls == 6 * 2, "silu's repetition and the product with a number"
    check(many_layers, graph, x, KERNELS[threads])


def test_memory_of_the_capture_may_be_reused(planner: MemoryPlanner) -> None:
    """A graph keeps the memory that it needs, and no other."""
    x = random(0)
    graph = record(constants, x, planner)
    junk = [torch.full((size,), 7.0).bfloat16() for size in (1, 4, 32, 384) for _ in range(20)]
    check(constants, graph, x)
    assert junk


def freed_and_taken_again(x: torch.Tensor) -> torch.Tensor:
    """Results and numbers whose memory is soon reused."""
    for index in range(40):
        scale = torch.full((32,), 1.0 + index / 64).bfloat16()
        row = torch.tensor([index / 16.0] * 32).bfloat16()
        x = (x * scale).float().bfloat16() if index % 3 else x * torch.tensor(0.5).bfloat16()
        x = torch.cat([x[:, :2] + row, (x - row)[:, 2:]], dim=1)
    return x


@pytest.mark.parametrize("size", [1, 7, 64])
def test_memory_may_be_reused_while_a_pass_is_captured(size: int, planner: MemoryPlanner) -> None:
    x = random(0, size, 4, 32)
    graph = record(freed_and_taken_again, x, planner)
    junk = [torch.full((32,), 7.0).bfloat16() for _ in range(200)]
    check(freed_and_taken_again, graph, x)
    assert junk


def test_a_pass_takes_no_more_memory_while_it_is_captured() -> None:
    results = []
    with GraphCapture(KERNELS[1]) as capture:
        x = random(0)
        for _ in range(50):
            x = x + x
            results.append(StorageWeakRef(x.untyped_storage()))
    assert capture._entries
    assert all(result.expired() for result in results[:-1])


DEPENDS: dict[str, Function] = {
    "item": lambda x: x + x[0, 0, 0].item(),
    "bool": lambda x: x + x if x.sum() > 0 else x,
    "int": lambda x: x + int(x[0, 0, 0]),
    "any": lambda x: x + 1 if (x > 0).any() else x,
    "equal": lambda x: x + torch.equal(x, x),
    "allclose": lambda x: x + torch.allclose(x, x),
    "nonzero": lambda x: x + torch.nonzero(x > 0).shape[0],
    "where": lambda x: x + len(torch.where(x > 0)[0]),
    "masked": lambda x: x[x > 0],
    "masked_by_bytes": lambda x: x[:, (x[0, :, 0] > 0).to(torch.uint8)],
    "unique": torch.unique,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.arange(3) + (x[:, 0, 0] > 0), dim=0),
    "one_hot": lambda x: nn.functional.one_hot((x > 0).long()),
    "slice": lambda x: x[: (x[0, 0, 0] > 0).long() + 1],
}


@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_values_is_refused(name: str, planner: MemoryPlanner) -> None:
    with pytest.raises(GraphCaptureError, match="depend on values"):
        record(DEPENDS[name], random(0), planner)
    assert KERNELS[1].record is None, "nothing is recorded any more"
    x = random(0)
    check(oneself, record(oneself, x, planner), x)
