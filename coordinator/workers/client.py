"""The coordinator's gRPC clients of the workers: one channel each, for the calls to the worker (`calls`) and, if it
decodes, its output stream.

The output stream (`output_reader`) carries the tokens of all requests of this coordinator, into one collector per
attempt. When the registry drops a worker, its client is closed and every attempt that runs there fails at once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from coordinator.background_tasks import BackgroundTasks
from coordinator.workers.calls.worker_calls import WorkerCalls
from coordinator.workers.output_collector import OutputCoalescer, OutputCollector, WorkerFailed
from coordinator.workers.output_reader import OutputReader
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    SplitserveError,
    UnavailableError,
)
from splitserve.logs import log_event, log_exception
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials
from splitserve.runtime.loops import LoopRunner
from splitserve.v1 import decode_pb2, prefill_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub

ABORT_TIMEOUT_S = 2.0
"""How long one try of an abort waits for the worker's answer."""
READ_AHEAD_BYTES = 32 * 1024
"""Flow-control window of a channel: a few steps of a large batch. When the coordinator lags, the worker then merges
its output, instead of filling socket buffers with many small stale messages."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
"""Between two tries of an abort."""
REOPEN_S = 1.0
"""How soon a client that could not be made is tried again."""
UNDELIVERED = (UnavailableError, DeadlineExceededError, CancelledByPeerError)


class WorkerClient:
    """The client of one boot of one worker."""

    def __init__(
        self,
        worker: Worker,
        coordinator_id: str,
        max_message_bytes: int,
        attachments: Iterator[int],
        security: ClusterCredentials = UNSECURED,
        coalescer: OutputCoalescer | None = None,
    ) -> None:
        """`attachments` numbers the output streams of this coordinator upwards."""
        self.worker = worker
        self._coordinator_id = coordinator_id
        self._channel = security.channel(
            worker.address,
            "worker" if worker.neutral else worker.pool,
            max_message_bytes=max_message_bytes,
            read_ahead_bytes=READ_AHEAD_BYTES,
        )
        self._calls = WorkerCalls(worker, self._channel, security.metadata)
        self._collectors: dict[str, OutputCollector] = {}
        """Of all attempts here; `_decoded` has those whose output comes from here."""
        self._decoded: dict[str, OutputCollector] = {}
        self.outputs = OutputReader(
            worker,
            DecodeServiceStub(self._channel),
            coordinator_id,
            security.metadata,
            self._decoded,
            attachments,
            coalescer,
        )
        self._lost: UnavailableError | None = None

    @contextmanager
    def attached(self, attempt_id: str, collector: OutputCollector, *, decodes: bool) -> Iterator[None]:
        """While the context is open, delivers the loss of the worker to `collector`, and, if it `decodes` this attempt,
        the output. One that only computes the prompt would say on its next output stream that it has lost the attempt.
        """
        self._collectors[attempt_id] = collector
        if decodes:
            self._decoded[attempt_id] = collector
        if self._lost is not None:
            collector.put(WorkerFailed(self.worker.key, self._lost))
        try:
            yield
        finally:
            del self._collectors[attempt_id]
            self._decoded.pop(attempt_id, None)

    async def run(self, on_open: Callable[[bool], None], loops: LoopRunner) -> None:
        """Keeps the worker's streams open until cancelled; tells `on_open` of the output stream, if it decodes."""
        async with asyncio.TaskGroup() as group:
            if self.worker.carries_calls:
                group.create_task(loops.run("calls", self._calls.run))
            if self.worker.decodes:
                group.create_task(loops.run("outputs", partial(self.outputs.run, on_open)))

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve. Raises UnavailableError: NO_OUTPUT_STREAM while the output stream is broken, WORKER_LOST as
        soon as the worker is dropped."""
        if not self.outputs.is_open:
            # The next stream may have been asked for without this request.
            message = f"the output stream of {self.worker.name} is broken"
            raise UnavailableError(message, reason="NO_OUTPUT_STREAM")
        request.coordinator_id = self._coordinator_id
        request.attachment = self.outputs.attachment
        return await self._calls.reserve(request, timeout_s)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, collector: OutputCollector
    ) -> None:
        """Calls Prefill and puts its messages, or its failure, into `collector`. Cancelling this cancels the call; see
        `WorkerCalls.prefill`."""
        complete = False

        def accept(response: prefill_pb2.PrefillResponse) -> None:
            nonlocal complete
            if response.HasField("first_token"):
                complete = response.first_token.delta.finish_reason != 0
                collector.put(response.first_token)
            elif response.HasField("handoff"):
                complete = True
                collector.put(response.handoff)

        try:
            await self._calls.prefill(request, timeout_s, accept)
            if not complete:
                raise UnavailableError(f"{self.worker.name} ended a prefill early", reason="WORKER_LOST")
        except SplitserveError as error:
            collector.put(WorkerFailed(self.worker.key, error))

    async def abort(self, attempt_id: str, no_writer: bool, deadline_s: float) -> None:
        """Calls Abort, again and again until the worker has answered, or is dropped.

        The next output stream from a worker that comes back tells it which requests are still wanted; one that does
        not come back ends them after its lease. At `deadline_s`, the request's own on the monotonic clock, the request
        ends by itself. `no_writer`: the prefill worker cannot write any more, so blocks need no quarantine.
        """
        request = decode_pb2.AbortRequest(
            request_id=attempt_id, coordinator_id=self._coordinator_id, no_writer=no_writer
        )
        backoff_s = FIRST_BACKOFF_S
        while self._lost is None:
            try:
                await self._calls.abort(request, ABORT_TIMEOUT_S)
                return
            except SplitserveError as error:
                log_event("abort.failed", worker_id=self.worker.worker_id, reason=error.reason)
                if not isinstance(error, UNDELIVERED) or time.monotonic() > deadline_s:
                    return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def fail(self, attempt_id: str, error: SplitserveError) -> bool:
        """Fails one attempt here, which then goes on elsewhere. False if it is not here any more."""
        collector = self._collectors.get(attempt_id)
        if not self._calls.fail_reservation(attempt_id, error) and collector is not None:
            collector.put(WorkerFailed(self.worker.key, error))
        return collector is not None

    def connect(self) -> None:
        """Starts connecting, so that the first request does not have to wait for it."""
        self._channel.get_state(try_to_connect=True)

    def lose(self) -> None:
        """Fails all attempts on this worker; new calls fail at once."""
        self._lost = UnavailableError(f"{self.worker.name} went away", reason="WORKER_LOST")
        self._calls.lose(self._lost)
        for collector in self._collectors.values():
            collector.put(WorkerFailed(self.worker.key, self._lost))

    async def close(self) -> None:
        """Closes the channel and cancels the calls on it."""
        await self._channel.close()


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
