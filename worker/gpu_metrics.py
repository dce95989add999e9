"""Prometheus metrics of a process's own GPUs, asked of the NVIDIA driver at each scrape."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.core import Metric

from splitserve.config.worker import WorkerConfig
from splitserve.errors import UnavailableError
from splitserve.gpus.inventory import is_mig
from splitserve.gpus.nvml import MIG_ENABLED, load_library
from splitserve.gpus.worker_gpus import VISIBLE_VARIABLE
from splitserve.logs import log_event
from splitserve.metrics import gauges

TEMPERATURE_GPU = 0
"""NVML_TEMPERATURE_GPU"""


READINGS: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "splitserve_gpu_memory_used_bytes": (
        "Memory in use, by all processes",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    "splitserve_gpu_memory_total_bytes": (
        "Memory",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    "splitserve_gpu_utilization_ratio": (
        "Share of the driver's last sampling period in which a kernel ran",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "splitserve_gpu_power_watts": ("Power draw", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    "splitserve_gpu_temperature_celsius": (
        "Temperature of the chip",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, TEMPERATURE_GPU),
    ),
    "splitserve_gpu_mig_enabled": (
        "1 in MIG mode",
        lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0] == MIG_ENABLED,
    ),
}
"""Series with their texts, and how each is read."""


class GpuMetrics:
    """The GPUs of this process. What the driver does not tell of a GPU, as the power of a MIG slice, has no series."""

    def __init__(self, gpus: Sequence[str] | None, library: Any = None) -> None:
        """`gpus`: numbers as of nvidia-smi, or UUIDs; empty: all that CUDA may use here; None: the process uses
        none."""
        self._names = gpus
        self._nvml = library
        self._handles: dict[str, Any] | None = {} if gpus is None else None

    def metrics(self) -> list[Metric]:
        """All series at one moment; none without GPU, driver or `nvidia-ml-py`. For the scraping thread."""
        if self._handles is None:
            self._handles = self._opened()
        series_with_samples = []
        for series, (text, read) in READINGS.items():
            samples = {name: value for name in self._handles if (value := self._read(read, name)) is not None}
            if samples:
                series_with_samples.append(gauges(series, text, "gpu", samples))
        return series_with_samples

    def _read(self, read: Callable[[Any, Any], float], name: str) -> float | None:
        assert self._nvml is not None
        assert self._handles is not None
        try:
            return float(read(self._nvml, self._handles[name]))
        except self._nvml.NVMLError:
            # The driver does not tell the MIG mode of a slice; its GPU is in MIG mode.
            return 1.0 if is_mig(name) and read is READINGS["splitserve_gpu_mig_enabled"][1] else None

    def _opened(self) -> dict[str, Any]:
        try:
            nvml = self._nvml = self._nvml or load_library()
        except UnavailableError as error:
            log_event("gpu_metrics.off", why=error.message)
            return {}
        try:
            nvml.nvmlInit()
            visible = [
                name.strip() for name in os.environ.get(VISIBLE_VARIABLE, "").split(",") if name.strip()
            ]
            names = self._names or visible or [str(number) for number in range(nvml.nvmlDeviceGetCount())]
            return {
                name: nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            }
        except nvml.NVMLError as error:
            log_event("gpu_metrics.off", why=str(error))
            return {}


def gpus_in_use(config: WorkerConfig) -> Sequence[str] | None:
    """A worker's argument for `GpuMetrics`: None where its engine computes on no GPU."""
    engine = config.engine
    return None if engine.kind == "simulated" or engine.device == "cpu" else config.gpus
