"""The graph that a step uses and its inputs. Fake graphs replace the device's: they compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dev import gpu_self_checks
from dev.gpu_self_checks import CHUNK_TOKENS, MAX_ROWS, STEPS
from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import NOWHERE, Staging, StepInputs
from engine.backends.cuda.step_graphs import MAX_CHUNKS, CudaStepGraphs
from engine.backends.interface import flatten
from engine.core.model_runner import SamplingParams, ScheduledSequence

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the runner computes."""
    with torch.inference_mode():
        yield


class FakeDevice:
    """Captures by recording what is computed from which tensors; replays by computing it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing: FakeGraph | None = None
        self.sync_debug: int | str = 0
        for name, replacement in {
            "synchronize": lambda *_: None,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": self.set_sync_debug,
            "CUDAGraph": FakeGraph,
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def set_sync_debug(self, mode: Any) -> None:
        self.sync_debug = mode

    @contextmanager
    def capture(self, graph: FakeGraph, pool: object, capture_error_mode: str) -> Iterator[None]:
        self.capturing = graph
        yield
        self.capturing = None


class FakeGraph:
    def __init__(self) -> None:
        self.work: tuple[StepInputs, torch.Tensor] | None = None

    def pool(self) -> str:
        return "memory"

    def replay(self) -> None:
        assert self.work is not None
        inputs, output = self.work
        output.copy_(model(inputs))


def model(inputs: StepInputs) -> torch.Tensor:
    """All inputs of each sampled row and its sequence, in one row."""
    rows = inputs.sample_rows
    owners = torch.searchsorted(inputs.query_starts, rows, right=True) - 1
    owners = owners.clamp(max=len(inputs.contexts) - 1)  # of a step without tokens
    first_blocks = inputs.tables[inputs.table_starts]
    by_row = (inputs.token_ids[0], inputs.positions[0], inputs.slots)
    by_sequence = (inputs.contexts, first_blocks, inputs.query_starts.diff())
    columns = [each[rows] for each in by_row] + [each[owners] for each in by_sequence]
    return torch.stack(columns, 1).float()


class Computed:
    """The model, which the device can capture."""

    def __init__(self, device: FakeDevice, trouble: str = "") -> None:
        self.device, self.trouble = device, trouble
        self.rows: list[int] = []

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        assert (inputs.slots == NOWHERE).all(), "capturing must not touch the pool"
        assert not inputs.contexts.any()
        if self.trouble and self.device.sync_debug == "error":
            raise RuntimeError(self.trouble)
        output = model(inputs)
        if self.device.capturing is not None:
            self.device.capturing.work = inputs, output
            self.rows.append(len(inputs.slots))
        return output


def step(rows: int, chunks: tuple[int, ...] = ()) -> list[ScheduledSequence]:
    """Sequences that decode, and chunks of so many tokens, every other one behind others."""
    sequences = []
    for row, new in enumerate([1] * rows + list(chunks)):
        context = 3 * row + new
        blocks = list(range(100 + 10 * row, 100 + 10 * row + -(-context // BLOCK)))
        sequences.append(
            ScheduledSequence(
                "r",
                [row] * context,
                1,
                context - new,
                new,
                blocks,
                True,
                SamplingParams(temperature=0.0),
                table_id=row + 1,
            )
        )
    return sequences[::2] + sequences[1::2]


class Rig:
    """Graphs, and the model on the same steps without them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, max_rows: int = 7, max_tokens: int = 100, seconds: float = 0.0
    ) -> None:
        """A step takes `seconds` for each of its tokens of chunks, and a short one 1 s in any case."""
        self.compute = Computed(FakeDevice(monkeypatch))
        self.table = DeviceBlockTable(16, 40, BLOCK, CPU)
        now = [0.0]

        def compute(inputs: StepInputs) -> torch.Tensor:
            now[0] += max(1.0, seconds * inputs.flat.longest_chunk)
            return self.compute(inputs)

        self.graphs = CudaStepGraphs(compute, CPU, max_rows, max_tokens, self.table, clock=lambda: now[0])

    def check(self, batch: list[ScheduledSequence]) -> None:
        flat = flatten(batch)
        found = self.graphs.logits(self.table.place(flat))
        assert found is not None
        assert torch.equal(found, model(Staging(8, CPU).stage(self.table.place(flat))))


def test_every_size_computes_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    sizes = rig.graphs.captured
    assert [size.decodes for size in sizes if not size.tokens] == [1, 2, 4, 8]
    assert [size[:2] for size in sizes if size.tokens] == [
        (beside, tokens) for beside in (0, 16) for tokens in (32, 64, 128)
    ]
    assert rig.compute.rows == sorted((size.rows for size in sizes), reverse=True), "the largest first"
    for rows in (7, 1, 2, 5, 8, 3):
        rig.check(step(rows))


def test_chunks_with_and_without_rows_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for rows, chunks in ((0, (5,)), (0, (32,)), (3, (2, 60)), (8, (7,) * 8), (1, (128,)), (0, (2,))):
        rig.check(step(rows, chunks))


def test_many_rows_have_no_graph_beside_chunks_of_more_rows_than_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Rig(monkeypatch, max_rows=100).graphs.captured
    assert [size[:2] for size in sizes if size.tokens and size.decodes > 16] == [(64, 32), (64, 64)]


def test_the_steps_of_the_self_test_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, MAX_ROWS, gpu_self_checks.MAX_CHUNKS * CHUNK_TOKENS)
    for rows, chunks in STEPS:
        rig.check(step(rows, (CHUNK_TOKENS,) * chunks))


def test_rows_that_are_not_sampled_have_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for sampled in ([1, 2], [], [0, 1, 2, 3]):
        rig.check([each._replace(sample=row in sampled) for row, each in enumerate(step(3))])
        rig.check([each._replace(sample=row in sampled) for row, each in enumerate(step(2, (9, 4)))])


def test_larger_steps_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert MAX_CHUNKS == 8
    for rows, chunks in ((9, ()), (0, (129,)), (3, (100, 29)), (0, (2,) * 9)):
        assert rig.graphs.logits(rig.table.place(flatten(step(rows, chunks)))) is None


def test_longer_chunks_have_no_graph_where_the_device_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, max_tokens=10_000, seconds=1 / 400)
    assert rig.graphs.chunk_tokens == max(size.tokens for size in rig.graphs.captured) == 512, (
        "1.28 s, not 1 s"
    )
    assert Rig(monkeypatch, max_tokens=10_000).graphs.chunk_tokens == 1024


def test_without_memory_for_chunks_steps_that_only_decode_keep_their_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = Computed(FakeDevice(monkeypatch))

    def compute(inputs: StepInputs) -> torch.Tensor:
        if inputs.flat.longest_chunk > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return computed(inputs)

    graphs = CudaStepGraphs(compute, CPU, 4, 100, DeviceBlockTable(4, 2, BLOCK, CPU))
    assert [size.decodes for size in graphs.captured] == [1, 2, 4]
    assert graphs.chunk_tokens == 0


def test_a_model_that_waits_for_the_device_gets_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    table = DeviceBlockTable(4, 2, BLOCK, CPU)
    compute = Computed(device, "called a synchronizing CUDA operation")
    graphs = CudaStepGraphs(compute, CPU, 4, 32, table)
    assert graphs.captured == []
    assert graphs.logits(table.place(flatten(step(1)))) is None
    assert device.sync_debug == 0, "put back"
