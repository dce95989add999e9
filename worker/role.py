"""The role of a worker: which requests coordinators send to it, and which new ones it refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from prometheus_client.core import Metric

from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, UnavailableError
from splitserve.gpus.worker_gpus import has_stages
from splitserve.logs import log_event
from splitserve.metrics import counter, gauges
from splitserve.roles import POOLS_OF, ROLE_NAMES, PoolName, RoleName
from splitserve.v1 import registry_pb2
from worker.build import VLLM

REFUSED_LOGGED_EVERY_S = 60.0


class Role:
    """A worker's role. The worker owns it; coordinators pass on what the autoscaler's plan says. The latest order
    counts."""

    def __init__(self, config: WorkerConfig, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change. Raises ConfigError as `check_role`."""
        check_role(config)
        self.name: RoleName = config.role
        self.may_change = has_both_ends(config)
        self._worker_id = config.worker_id
        self._on_change = on_change
        self._changes = 0
        self._refused_logged_s = float("-inf")

    def require(self, pool: PoolName) -> None:
        """Raises UnavailableError (WRONG_ROLE) unless the worker takes new requests of a pool."""
        if pool not in POOLS_OF[self.name]:
            message = f"worker {self._worker_id} has role {self.name}, and takes no new requests of {pool}"
            raise UnavailableError(message, reason="WRONG_ROLE")

    def follow(self, coordinator: str, number: registry_pb2.Role.ValueType) -> None:
        """Takes the role that a coordinator asks for. Requests under way go on as they are. A number that this version
        does not know, and a change for a worker that has only one end of the transfer, are refused and logged."""
        name = ROLE_NAMES.get(number)
        if name == self.name:
            return
        if name is None or not self.may_change:
            self._log_refused(coordinator, number)
            return
        before, self.name = self.name, name
        self._changes += 1
        change: dict[str, Any] = {"from": before, "to": name}
        log_event("worker.role_changed", worker_id=self._worker_id, asked_by=coordinator, **change)
        self._on_change()

    def metrics(self) -> list[Metric]:
        """The role, and its changes since the start."""
        roles: dict[str, float] = {name: float(name == self.name) for name in POOLS_OF}
        return [
            gauges("splitserve_worker_role", "Role of the worker", "role", roles),
            counter("splitserve_worker_role_changes", "Changes of the worker's role", self._changes),
        ]

    def _log_refused(self, coordinator: str, number: int) -> None:
        now = time.monotonic()
        if now - self._refused_logged_s >= REFUSED_LOGGED_EVERY_S:
            self._refused_logged_s = now
            log_event(
                "worker.role_refused",
                level=logging.WARNING,
                worker_id=self._worker_id,
                asked_by=coordinator,
                role=ROLE_NAMES.get(number, number),
            )


def has_both_ends(config: WorkerConfig) -> bool:
    """Whether the worker has both ends of the transfer, so that its role can change. A vLLM whose layers lie in several
    pipeline stages can send KV, and receives none."""
    return config.engine.kind != VLLM or not has_stages(config.engine.engine_args)


def check_role(config: WorkerConfig) -> None:
    """Raises ConfigError, naming the field, for a role that the worker cannot have."""
    if config.role != "prefill" and not has_both_ends(config):
        message = (
            "engine.engine_args: --pipeline-parallel-size is for prefill workers: vLLM writes KV to one stage"
        )
        raise ConfigError(message, field="engine.engine_args")
    if config.role == "both" and config.engine.max_running_requests < 2:
        message = (
            "engine.max_running_requests: role both needs at least 2, as reservations leave one to prompts"
        )
        raise ConfigError(message, field="engine.max_running_requests")
