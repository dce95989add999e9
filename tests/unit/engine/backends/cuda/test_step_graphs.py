"""The graph that a step uses and its inputs. Fake graphs replace the device's: they compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dev.gpu_self_checks import MAX_ROWS, STEPS
from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import NOWHERE, Staging, StepInputs
from engine.backends.cuda.step_graphs import CudaStepGraphs
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_rows: int = 7) -> None:
        self.compute = Computed(FakeDevice(monkeypatch))
        self.table = DeviceBlockTable(16, 40, BLOCK, CPU)
        self.graphs = CudaStepGraphs(self.compute, CPU, max_rows, self.table)

    def check(self, batch: list[ScheduledSequence]) -> None:
        flat = flatten(batch)
        found = self.graphs.logits(self.table.place(flat))
        assert found is not None
        assert torch.equal(found, model(Staging(8, CPU).stage(self.table.place(flat))))


def test_every_size_computes_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert rig.graphs.captured == [1, 2, 4, 8]
    assert rig.compute.rows == [8, 4, 2, 1], "the largest first"
    for rows in (7, 1, 2, 5, 8, 3):
        rig.check(step(rows))


def test_the_steps_of_the_self_test_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, MAX_ROWS)
    for rows in STEPS:
        rig.check(step(rows))


def test_rows_that_are_not_sampled_have_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for sampled in ([1, 2], [], [0, 1, 2, 3]):
        rig.check([each._replace(sample=row in sampled) for row, each in enumerate(step(3))])


def test_larger_steps_and_chunks_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for rows, chunks in ((9, ()), (0, (2,)), (3, (29,))):
        assert rig.graphs.logits(rig.table.place(flatten(step(rows, chunks)))) is None


def test_without_memory_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = Computed(FakeDevice(monkeypatch))

    def compute(inputs: StepInputs) -> torch.Tensor:
        if computed.device.capturing is not None and inputs.flat.num_decode == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return computed(inputs)

    assert CudaStepGraphs(compute, CPU, 4, DeviceBlockTable(4, 2, BLOCK, CPU)).captured == []


def test_a_model_that_waits_for_the_device_gets_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    table = DeviceBlockTable(4, 2, BLOCK, CPU)
    compute = Computed(device, "called a synchronizing CUDA operation")
    graphs = CudaStepGraphs(compute, CPU, 4, table)
    assert graphs.captured == []
    assert graphs.logits(table.place(flatten(step(1)))) is None
    assert device.sync_debug == 0, "put back"
