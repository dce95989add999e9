"""Moves the unfinished requests of a worker to others, shortly before its machine ends according to a notice."""

from __future__ import annotations

import asyncio
import logging
import time

from prometheus_client.core import Metric

from coordinator.health.circuit_breakers import MOVED
from coordinator.workers.client import WorkerClients
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.metrics import gauge

LOOK_EVERY_S = 0.1
MARGIN_S = 3.0
"""How long before the machine's end all requests leave its worker: enough time to route them again."""


class NoticeMover:
    """A worker with a notice takes no new requests. Requests that it has not finished `MARGIN_S` before the end of its
    machine resume on other workers. While no others serve its model, they stay: the machine may live longer."""

    def __init__(self, registry: Registry, clients: WorkerClients) -> None:
        self._registry, self._clients = registry, clients
        self._left: set[WorkerKey] = set()
        """Workers whose requests have left."""
        self._stuck: set[WorkerKey] = set()
        """Workers whose requests no other worker can take."""

    async def run(self) -> None:
        """Looks while any worker has a notice, until cancelled."""
        while True:
            version = self._registry.version
            if self.look(time.monotonic()):
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                await self._registry.wait_change(version)

    def look(self, now: float) -> bool:
        """Moves the requests of each worker whose time is up. Returns whether any worker has a notice."""
        preempted = self._registry.snapshot().preempted
        self._left &= {worker.key for worker in preempted}
        self._stuck &= {worker.key for worker in preempted}
        for worker in preempted:
            if worker.key not in self._left and (worker.preempted_in_s(now) or 0.0) <= MARGIN_S:
                self._move_all(worker)
        return bool(preempted)

    def metrics(self) -> list[Metric]:
        """How many workers have a notice."""
        text = "Registered workers whose machines are being taken away"
        return [gauge("splitserve_preempted_workers", text, len(self._registry.snapshot().preempted))]

    def _move_all(self, worker: Worker) -> None:
        if worker.model.name not in self._registry.snapshot().ready_models():
            if worker.key not in self._stuck:
                self._stuck.add(worker.key)
                log_event("notice.stuck", level=logging.WARNING, worker_id=worker.worker_id)
            return
        error = UnavailableError(f"the machine of {worker.name} is taken away", reason=MOVED)
        try:
            self._clients.client_for(worker).fail_all(error)
        except UnavailableError:
            return  # the worker has just gone, and its requests resume for that reason
        self._left.add(worker.key)
