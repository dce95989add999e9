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
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Departed:
    """A worker as it was when it left the registry, and until when it is probed (monotonic time)."""

    worker: Worker
    give_up_s: float
    again: asyncio.Event
    """Set when the worker comes back and leaves again."""


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
        self._departed: dict[WorkerKey, _Departed] = {}
        """Workers being probed, by one task each. A worker that comes back and leaves again keeps its task."""

    def report_ended(self, boots: Iterable[WorkerKey]) -> None:
        """Takes a runtime's report that the processes of these boots have ended. Unknown boots are ignored."""
        for key in boots:
            departed = self._departed.get(key)
            worker = departed.worker if departed is not None else self._registry.get(key)
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
                    probed = self._departed.get(key)
                    again = asyncio.Event() if probed is None else probed.again
                    self._departed[key] = _Departed(self._known[key], time.monotonic() + GIVE_UP_S, again)
                    if probed is None:
                        probe = partial(self._probe_until_ended, key)
                        group.create_task(self._loops.run("probe", probe))
                    else:
                        again.set()
                self._known = present

    async def _probe_until_ended(self, key: WorkerKey) -> None:
        pause_s, again = FIRST_PAUSE_S, self._departed[key].again
        while not await self._is_over(self._departed[key]):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await again.wait()
            pause_s = FIRST_PAUSE_S if again.is_set() else min(2 * pause_s, LAST_PAUSE_S)
            again.clear()
        del self._departed[key]

    async def _is_over(self, departed: _Departed) -> bool:
        """Whether probing may end. Reports proof that the process has ended."""
        worker = departed.worker
        if time.monotonic() >= departed.give_up_s or self._registry.get(worker.key) is not None:
            return True
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
