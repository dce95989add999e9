"""Which settings the services have that deployment files start, by the word after `splitserve`."""

from __future__ import annotations

from collections.abc import Mapping

from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.config.base import Settings
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.worker import WorkerConfig

COMMANDS: Mapping[str, type[Settings]] = {
    "coordinator": CoordinatorConfig,
    "prefill-worker": WorkerConfig,
    "decode-worker": WorkerConfig,
    "worker": WorkerConfig,
    "autoscaler": AutoscalerConfig,
}
