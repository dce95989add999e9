"""A worker's metrics: steps, handoffs by lane, GPUs as the driver tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.core import Metric

from engine.scheduling.step_times import StepMeter, StepPart
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from tests.support.gpus.nvml import FakeGpu, FakeNvml
from worker.connector import WorkerStatus, Writes
from worker.gpu_metrics import READINGS, GpuMetrics, gpus_in_use
from worker.metrics import step_metrics, worker_metrics

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def values(metrics: list[Metric]) -> dict[tuple[str, ...], float]:
    """Values by name, without `splitserve_`, and labels."""
    return {
        (sample.name.removeprefix("splitserve_"), *sample.labels.values()): sample.value
        for family in metrics
        for sample in family.samples
    }


def metered() -> StepMeter:
    """A step of a prompt of 50 tokens beside a decoding sequence, and two that decode, of 0.5 s each."""
    meter = StepMeter()
    decoding, prompt, begun = StepPart(9, 1), StepPart(0, 50), StepPart(49, 1)
    for number, parts in enumerate(([decoding, prompt], [decoding, begun], [decoding])):
        meter.begin(float(number))
        meter.expect(parts)
        meter.end(number + 0.5, more=False)
    return meter


def test_steps_are_counted_by_kind() -> None:
    found = values(step_metrics(metered().totals))
    assert found["step_seconds_count", "prefill"] == 1
    assert found["step_seconds_sum", "decode"] == pytest.approx(1.0)
    assert found["step_sequences_bucket", "decode", "1.0"] == 1
    assert found["step_sequences_bucket", "decode", "2.0"] == 2
    assert found["step_sequences_sum", "decode"] == 3
    assert found["step_tokens_total", "prefill", "prompt"] == 50
    assert found["step_tokens_total", "prefill", "output"] == 1
    assert found["step_tokens_total", "decode", "output"] == 3


def test_handoffs_by_lane() -> None:
    writes: Writes = {("rdma", "completed"): 2, ("tcp", "failed"): 1}
    found = values(worker_metrics(WorkerStatus(writes=writes)))
    assert found["handoffs_total", "rdma", "completed"] == 2
    assert found["handoffs_total", "tcp", "failed"] == 1
    assert not any(name == "handoffs_total" for name, *_ in values(worker_metrics(WorkerStatus())))


def test_a_gpu_s_series_are_those_of_the_page() -> None:
    found = values(GpuMetrics(["1"], FakeNvml.of(2)).metrics())
    assert found == {
        ("gpu_memory_used_bytes", "1"): 2**30,
        ("gpu_memory_total_bytes", "1"): 80 * 2**30,
        ("gpu_utilization_ratio", "1"): 0.5,
        ("gpu_power_watts", "1"): 400.0,
        ("gpu_temperature_celsius", "1"): 60.0,
        ("gpu_mig_enabled", "1"): 0.0,
    }
    page = PAGE.read_text()
    for series in READINGS:
        assert f"`{series}`" in page


def test_without_names_all_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert {labels[1] for labels in values(GpuMetrics([], FakeNvml.of(3)).metrics())} == {"0", "1", "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    assert {labels[1] for labels in values(GpuMetrics([], FakeNvml.of(3)).metrics())} == {"0", "2"}


def test_a_mig_slice_has_what_the_driver_tells_of_it() -> None:
    nvml = FakeNvml([FakeGpu("GPU-1", ["MIG-a", "MIG-b"])])
    assert values(GpuMetrics(["MIG-b"], nvml).metrics()) == {
        ("gpu_memory_used_bytes", "MIG-b"): 2**30,
        ("gpu_memory_total_bytes", "MIG-b"): 80 * 2**30,
        ("gpu_mig_enabled", "MIG-b"): 1.0,
    }


@pytest.mark.parametrize("gpus", [[], ["7"], ["GPU-of-elsewhere"]])
def test_without_driver_or_gpu_there_are_no_series(gpus: list[str]) -> None:
    nvml = FakeNvml.of(1)
    nvml.driver = bool(gpus)
    assert GpuMetrics(gpus, nvml).metrics() == []
    assert GpuMetrics(None, FakeNvml.of(1)).metrics() == []


def test_only_engines_that_compute_on_a_gpu_have_any() -> None:
    def of(**engine: object) -> object:
        return gpus_in_use(WorkerConfig(worker_id="w", model="m", gpus=("1",), engine=EngineConfig(**engine)))  # type: ignore[arg-type]

    assert of(kind="simulated") is None
    assert of(device="cpu") is None
    assert of(device="cuda:0") == ("1",)
