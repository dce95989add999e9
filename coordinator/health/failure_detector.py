"""Detects that a prefill worker's process has ended. Until then decode workers quarantine the blocks it may write to.

Only proof counts, because a process that is stopped, slow or partitioned may still write. Proof is

* a refused connection at the worker's address: a worker closes its port after its transport (`worker.process`);
* a later boot that registered at the same address of the same machine: no two processes share a port, so the older one
  has lost it. The same worker id at another address proves nothing, nor does an address that now leads to another
  machine;
* a report of the runtime that saw the process end (`ScalingService.ReportEnded`): the name of a container vanishes
  with it, and then no host refuses a connection.

Silence, a broken stream, an unknown host name and an unreachable host are not proof.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.addresses import split_address
from splitserve.logs import log_event
from splitserve.runtime.loops import LoopRunner

CONNECT_TIMEOUT_S = 1.0
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
GIVE_UP_S = 600.0
"""How long a departed worker is probed. All its tickets have expired by then."""


class FailureDetector:
    """Probes every worker that writes KV, from the time it leaves the registry until it is back, has provably ended, or
    GIVE_UP_S have passed."""

    def __init__(
        self,
        registry: Registry,
        loops: LoopRunner | None = None,
        refused: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`refused` replaces `is_refused`."""
        self._registry, self._refused = registry, refused or is_refused
        self._loops = loops or LoopRunner()
        self._known: dict[WorkerKey, Worker] = {}
        self._departed: dict[WorkerKey, tuple[Worker, asyncio.Task[None]]] = {}
        """Workers that are probed, as they were when they left the registry, and the tasks that probe them."""

    def report_ended(self, boots: Iterable[WorkerKey]) -> None:
        """Takes a runtime's report that the processes of these boots have ended. Unknown boots are ignored."""
        for key in boots:
            worker = self._departed[key][0] if key in self._departed else self._registry.get(key)
            if worker is None:
                continue
            self._registry.drop(key, "its runtime says that it has ended")
            if worker.sends_kv and not self._registry.has_ended(worker):
                self._conclude(worker, "runtime")

    async def run(self) -> None:
        """Watches the registry until cancelled."""
        version = -1
        async with asyncio.TaskGroup() as group:
            while True:
                version = await self._registry.wait_change(version)
                workers = self._registry.snapshot().workers
                present = {worker.key: worker for worker in workers if worker.sends_kv}
                for key in self._known.keys() - present.keys():
                    worker = self._known[key]
                    probe = partial(self._probe_until_ended, worker)
                    self._departed[key] = worker, group.create_task(self._loops.run("probe", probe))
                for key in self._departed.keys() & present.keys():
                    _, task = self._departed.pop(key)
                    task.cancel()
                self._known = present

    async def _probe_until_ended(self, worker: Worker) -> None:
        give_up_s, pause_s = time.monotonic() + GIVE_UP_S, FIRST_PAUSE_S
        while time.monotonic() < give_up_s and not await self._is_over(worker):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        del self._departed[worker.key]

    async def _is_over(self, worker: Worker) -> bool:
        """Whether probing may end. Reports proof that the process has ended."""
        if self._registry.has_ended(worker):
            return True
        if self._replaced(worker):
            self._conclude(worker, "replaced")
            return True
        if await self._refused(worker.address) and not self._registry.has_ended(worker):
            self._conclude(worker, "refused")
            return True
        return False

    def _conclude(self, worker: Worker, proof: str) -> None:
        self._registry.mark_ended(worker)
        log_event("worker.ended", worker_id=worker.worker_id, agent_id=worker.agent_id, proof=proof)

    def _replaced(self, departed: Worker) -> bool:
        place = departed.address, departed.host_id
        workers = self._registry.snapshot().workers
        return any((other.address, other.host_id) == place and other.key != departed.key for other in workers)


async def is_refused(address: str) -> bool:
    """Whether a connection to "host:port" is refused. False if that cannot be determined."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # also TimeoutError; a malformed host name is a ValueError
        return False
    writer.close()
    return False
