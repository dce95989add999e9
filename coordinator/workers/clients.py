"""A client for every registered worker."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial

from coordinator.background_tasks import BackgroundTasks
from coordinator.workers.client import WorkerClient
from coordinator.workers.output_collector import OutputCoalescer
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import UnavailableError
from splitserve.logs import log_exception
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials
from splitserve.runtime.loops import LoopRunner

REOPEN_S = 1.0
"""How soon a client that could not be made is tried again."""


class WorkerClients:
    """A client for every registered worker, kept in step with the registry by `run`."""

    def __init__(
        self,
        registry: Registry,
        background: BackgroundTasks,
        coordinator_id: str,
        max_message_bytes: int,
        security: ClusterCredentials = UNSECURED,
        coalescer: OutputCoalescer | None = None,
        loops: LoopRunner | None = None,
    ) -> None:
        self._registry = registry
        self._coalescer = coalescer
        self._background = background
        self._coordinator_id = coordinator_id
        self._max_message_bytes = max_message_bytes
        self._security = security
        self._loops = loops or LoopRunner()
        self._attachments = itertools.count(1)
        self._clients: dict[WorkerKey, WorkerClient] = {}
        self._watchers: dict[WorkerKey, asyncio.Task[None]] = {}

    def client_for(self, worker: Worker) -> WorkerClient:
        """The client of a worker. Raises UnavailableError (WORKER_LOST) if the worker has been dropped."""
        client = self._clients.get(worker.key)
        if client is None:
            raise UnavailableError(f"{worker.name} went away", reason="WORKER_LOST")
        return client

    async def run(self) -> None:
        """Opens and closes clients as workers come and go, until cancelled; then closes all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                version = -1
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(None if self._reconcile(group) else REOPEN_S):
                            version = await self._registry.wait_change(version)
        finally:
            clients = list(self._clients.values())
            self._clients.clear()
            self._watchers.clear()
            for client in clients:
                client.lose()
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    def _reconcile(self, group: asyncio.TaskGroup) -> bool:
        """False if a worker's client could not be made, which may work later."""
        wanted = {worker.key: worker for worker in self._registry.snapshot().workers}
        for key in self._clients.keys() - wanted.keys():
            if watcher := self._watchers.pop(key, None):
                watcher.cancel()
            client = self._clients.pop(key)
            client.lose()
            self._background.start(client.close())
        for key in wanted.keys() - self._clients.keys():
            self._open(wanted[key], group)
        for key, client in self._clients.items():
            # A boot that registered again kept its client, and with it its open stream.
            self._registry.set_output_open(key, client.outputs.is_open)
        return len(self._clients) == len(wanted)

    def _open(self, worker: Worker, group: asyncio.TaskGroup) -> None:
        try:
            client = WorkerClient(
                worker,
                self._coordinator_id,
                self._max_message_bytes,
                self._attachments,
                self._security,
                self._coalescer,
            )
            client.connect()
        except Exception as error:  # one worker's address or certificate must not cost the others theirs
            log_exception("worker.no_client", error, worker_id=worker.worker_id)
            return
        self._clients[worker.key] = client
        on_open = partial(self._registry.set_output_open, worker.key)
        self._watchers[worker.key] = group.create_task(client.run(on_open, self._loops))
