"""A worker's metrics: steps and what they ask of the device, handoffs by lane, GPUs as the driver tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.core import Metric

from engine.core.sequence import Sequence
from engine.core.step_stats import StepMeter, StepWork
from engine.worker.gpu_metrics import READINGS, GpuMetrics, gpus_in_use
from engine.worker.metrics import step_metrics, work_metrics, worker_metrics
from engine.worker.status import HandoffWrites, WorkerStatus
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from tests.support.engine.engine_rig import request
from tests.support.gpus.nvml import FakeGpu, FakeNvml

PAGE = Path(__file__).parents[4] / "docs/metrics.md"
WORK = StepWork(weight_bytes=1000, layer_weights=400, output_weights=100, kv_token_bytes=8)


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
    decoding, prompt = (Sequence(request(name), number) for number, name in enumerate("dp"))
    decoding.num_computed, prompt.num_computed = 10, 50
    for number, step in enumerate(({decoding: 1, prompt: 50}, {decoding: 1, prompt: 1}, {decoding: 1})):
        meter.begin(float(number))
        meter.end(number + 0.5, step, more=False)
    return meter


def test_steps_are_counted_by_kind() -> None:
    found = values(step_metrics(metered().totals))
    assert found["step_seconds_count", "prefill"] == 1
    assert found["step_seconds_sum", "decode"] == pytest.approx(1.0)
    assert found["step_sequences_bucket", "decode", "1"] == 1
    assert found["step_sequences_bucket", "decode", "2"] == 2
    assert found["step_sequences_sum", "decode"] == 3
    assert found["step_tokens_total", "prefill", "prompt"] == 50
    assert found["step_tokens_total", "prefill", "output"] == 1
    assert found["step_tokens_total", "decode", "output"] == 3


def test_what_steps_ask_of_the_device() -> None:
    found = values(work_metrics(metered().totals, WORK, EngineConfig()))
    assert found == {
        ("step_read_bytes_total", "prefill"): 1000 + 8 * (10 + 50),
        ("step_read_bytes_total", "decode"): 2 * 1000 + 8 * (10 + 50 + 10),
        ("step_matmul_flops_total", "prefill"): 2 * (400 * 51 + 100 * 1),
        ("step_matmul_flops_total", "decode"): 2 * (400 * 3 + 100 * 3),
    }
    config = EngineConfig(measured_memory_gb_per_s=4000, measured_matmul_tflops=900)
    assert values(work_metrics(metered().totals, None, config)) == {
        ("measured_memory_bytes_per_second",): 4e12,
        ("measured_matmul_flops_per_second",): 9e14,
    }


def test_handoffs_by_lane() -> None:
    writes = HandoffWrites().ended("rdma", "completed", 3, 2).ended("rdma", "completed", 1, 1)
    writes = writes.ended("tcp", "failed")
    found = values(worker_metrics(WorkerStatus(writes=writes)))
    assert found["handoffs_total", "rdma", "completed"] == 2
    assert found["handoffs_total", "tcp", "failed"] == 1
    assert found["handoff_descriptors_total",] == 4
    assert found["handoff_contiguous_runs_total",] == 3
    assert ("handoff_descriptors_total",) not in values(worker_metrics(WorkerStatus()))


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
