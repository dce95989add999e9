"""The neutral worker process: its role, which serves both pools, and `serve`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.core import Metric

from engine.worker.build import VLLM, EngineParts
from engine.worker.process import WorkerProcess
from engine.worker.role import POOL_NAMES
from neutral_worker.composed_role import ComposedRole
from neutral_worker.leaning import Leaning
from neutral_worker.neutral_connector import NeutralConnector
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.metrics import counter, gauges
from splitserve.v1 import registry_pb2

UNKNOWN_LOGGED_EVERY_S = 60.0


class NeutralRole(ComposedRole):
    """Computes prompts and decodes, whichever way it leans: what a leaning changes is what coordinators send here."""

    certificate = "worker"
    neutral = True

    def __init__(self, worker: WorkerProcess[NeutralConnector]) -> None:
        super().__init__(worker)
        self._leaning = Leaning(worker.config.leaning)
        self._unknown_logged_s = float("-inf")

    @property
    def pool(self) -> registry_pb2.Pool.ValueType:
        """See WorkerRole."""
        return self._leaning.pool

    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> NeutralConnector:
        """See WorkerRole."""
        parts.core.keep_prompt_room()
        return super().make_connector(parts, epoch, on_idle)

    def on_leaning(self, coordinator: str, pool: registry_pb2.Pool.ValueType) -> None:
        """Leans that way at once, and reports it. Requests go on as they are, and either service takes new ones."""
        if pool not in POOL_NAMES:
            self._log_unknown(coordinator, pool)
            return
        before = self._leaning.name
        if self._leaning.follow(pool):
            moved: dict[str, Any] = {"from": before, "to": self._leaning.name}
            log_event(
                "worker.leaning", worker_id=self._worker.config.worker_id, asked_by=coordinator, **moved
            )
            self._worker.report_soon()

    def metrics(self) -> list[Metric]:
        """See WorkerRole."""
        lean = {name: float(name == self._leaning.name) for name in POOL_NAMES.values()}
        return [
            gauges("splitserve_leaning", "Which pool a neutral worker leans to", "pool", lean),
            counter(
                "splitserve_leaning_changes", "Changes of a neutral worker's leaning", self._leaning.changes
            ),
        ]

    def _log_unknown(self, coordinator: str, pool: int) -> None:
        now = time.monotonic()
        if now - self._unknown_logged_s >= UNKNOWN_LOGGED_EVERY_S:
            self._unknown_logged_s = now
            log_event("worker.leaning_unknown", level=logging.WARNING, asked_by=coordinator, leaning=pool)


def check_neutral(config: WorkerConfig) -> None:
    """Raises ConfigError, naming the field, for settings that a neutral worker cannot run with."""
    if config.engine.kind == VLLM:
        message = (
            "engine.kind: a neutral worker runs engine torch or simulated; start prefill-worker and decode-worker for "
            "engine vllm, whose scheduler keeps no room for prompts"
        )
        raise ConfigError(message, field="engine.kind")
    if config.engine.max_running_requests < 2:
        message = "engine.max_running_requests: a neutral worker needs at least 2, as reservations leave one to prompts"
        raise ConfigError(message, field="engine.max_running_requests")


async def serve(config: WorkerConfig) -> None:
    """Runs a neutral worker until SIGTERM or SIGINT. Raises ConfigError as `check_neutral`."""
    check_neutral(config)
    await WorkerProcess(config, NeutralRole).run()
