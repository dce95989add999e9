"""The graph that a step uses and its inputs. Fake graphs replace the device's: they compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.decode_graphs import CudaDecodeGraphs
from engine.backends.cuda.staging import NOWHERE, StepInputs
from engine.backends.interface import flatten
from engine.core.types import SamplingParams, ScheduledSequence

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
        self.sync_debug = 0
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
    """All inputs of each row, in one row."""
    first_blocks = inputs.tables[inputs.table_starts]
    columns = (inputs.token_ids[0], inputs.positions[0], inputs.slots, inputs.contexts, first_blocks)
    return torch.stack(columns, 1).float()


class Computed:
    """The model, which the device can capture."""

    def __init__(self, device: FakeDevice, trouble: str = "") -> None:
        self.device, self.trouble, self.rows = device, trouble, []

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        assert (inputs.slots == NOWHERE).all(), "capturing must not touch the pool"
        assert not inputs.contexts.any()
        if self.trouble and self.device.sync_debug == "error":
            raise RuntimeError(self.trouble)
        output = model(inputs)
        if self.device.capturing is not None:
            self.device.capturing.work = inputs, output
            self.rows.append(len(output))
        return output


def step(rows: int) -> list[ScheduledSequence]:
    sequences = []
    for row in range(rows):
        context = 3 * row + 1
        blocks = list(range(100 + 10 * row, 100 + 10 * row + -(-context // BLOCK)))
        sequences.append(
            ScheduledSequence(
                "r",
                [row] * context,
                1,
                context - 1,
                1,
                blocks,
                True,
                SamplingParams(temperature=0.0),
                table_id=row + 1,
            )
        )
    return sequences


def test_every_size_computes_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Computed(FakeDevice(monkeypatch))
    table = DeviceBlockTable(8, 8, BLOCK, CPU)
    graphs = CudaDecodeGraphs(compute, CPU, max_rows=7, table=table)
    assert graphs.captured == [1, 2, 4, 8]
    assert compute.rows == [8, 4, 2, 1], "the largest first"
    for rows in (7, 1, 2, 5, 8, 3):
        logits = graphs.logits(table.place(flatten(step(rows))))
        assert logits is not None
        assert logits.tolist() == [
            [
                row,
                3 * row,
                (100 + 10 * row + 3 * row // BLOCK) * BLOCK + 3 * row % BLOCK,
                3 * row + 1,
                100 + 10 * row,
            ]
            for row in range(rows)
        ]


def test_rows_that_are_not_sampled_have_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceBlockTable(8, 8, BLOCK, CPU)
    graphs = CudaDecodeGraphs(Computed(FakeDevice(monkeypatch)), CPU, max_rows=4, table=table)
    for sampled in ([1, 2], [], [0, 1, 2]):
        batch = [each._replace(sample=row in sampled) for row, each in enumerate(step(3))]
        logits = graphs.logits(table.place(flatten(batch)))
        assert logits is not None
        assert logits[:, 0].tolist() == sampled


def test_larger_steps_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceBlockTable(8, 8, BLOCK, CPU)
    graphs = CudaDecodeGraphs(Computed(FakeDevice(monkeypatch)), CPU, max_rows=4, table=table)
    assert graphs.logits(table.place(flatten(step(5)))) is None
    assert graphs.logits(table.place(flatten(step(4)))) is not None


def test_a_model_that_waits_for_the_device_gets_no_graphs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    device = FakeDevice(monkeypatch)
    table = DeviceBlockTable(4, 2, BLOCK, CPU)
    graphs = CudaDecodeGraphs(Computed(device, "called a synchronizing CUDA operation"), CPU, 4, table)
    assert graphs.captured == []
    assert graphs.logits(table.place(flatten(step(1)))) is None
    assert device.sync_debug == 0, "put back"
