"""Finds out which prefill workers' processes have ended, for decode workers keep blocks back until they know.

Only proof counts, because a process that is stopped, slow or cut off may still write. Proof is that at the
address where the worker listened a connection is refused, or that a later boot has registered there: a
worker closes its port after its transport (`engine.host`), and no two processes share a port. Silence, a
broken stream and an unreachable host prove nothing.
"""

from __future__ import annotations

import asyncio
import time

from coordinator.pools import Worker, WorkerKey
from coordinator.registry import Registry
from splitserve.logs import log_event

CONNECT_TIMEOUT_S = 1.0
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
LOOK_FOR_S = 600.0
"""By then tickets have run out by themselves."""


class EndedWorkers:
    """Looks after every prefill worker that leaves the registry until it is back, proved ended, or forgotten."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def run(self) -> None:
        """Watches the registry until cancelled."""
        known: dict[WorkerKey, Worker] = {}
        version = -1
        async with asyncio.TaskGroup() as group:
            while True:
                version = await self._registry.wait_change(version)
                workers = self._registry.snapshot().workers
                present = {worker.key: worker for worker in workers if worker.pool == "prefill"}
                for key in known.keys() - present.keys():
                    group.create_task(self._look_after(known[key]))
                known = present

    async def _look_after(self, gone: Worker) -> None:
        give_up_s = time.monotonic() + LOOK_FOR_S
        pause_s = FIRST_PAUSE_S
        while time.monotonic() < give_up_s and self._registry.get(gone.key) is None:
            if self._replaced(gone) or await is_refused(gone.address):
                self._registry.note_ended(gone)
                log_event("worker.ended", worker_id=gone.worker_id, agent_id=gone.agent_id)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _replaced(self, gone: Worker) -> bool:
        workers = self._registry.snapshot().workers
        return any(worker.address == gone.address and worker.key != gone.key for worker in workers)


async def is_refused(address: str) -> bool:
    """Whether nobody listens at "host:port". False when that cannot be told."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one too
        return False
    writer.close()
    return False
