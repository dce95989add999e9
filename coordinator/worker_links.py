"""The coordinator's connections to workers: one channel each, and from each decode worker one output stream.

The output stream carries the tokens of all requests of this coordinator; it is demultiplexed here into
one inbox a request. A worker that the registry drops loses its link, and with it every attempt that runs
there learns at once that its worker is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from coordinator.background import Background
from coordinator.inbox import Inbox, WorkerFailed
from coordinator.pools import Worker, WorkerKey
from coordinator.pulse import Pulse
from coordinator.registry import Registry
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.part_security import UNSECURED, PartSecurity
from splitserve.rpc import error_from_rpc
from splitserve.rpc_errors import failure_error
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub

ABORT_TIMEOUT_S = 2.0
ARRIVE_S = 2.0
"""How long a call that is given up is waited for, if it has not reached its worker yet."""
STREAM_OPEN_TIMEOUT_S = 5.0
READ_AHEAD_BYTES = 32 * 1024
"""What a worker may send before it is read: a few steps of a large batch. A coordinator that lags then has the worker
merge what follows, instead of finding all of it, piece by piece and old, in its sockets."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0

T = TypeVar("T")


class WorkerLink:
    """The connection to one boot of one worker."""

    def __init__(
        self,
        worker: Worker,
        coordinator_id: str,
        max_message_bytes: int,
        security: PartSecurity = UNSECURED,
        pulse: Pulse | None = None,
    ) -> None:
        self.worker = worker
        self._pulse = pulse
        self.output_open = False
        self._coordinator_id = coordinator_id
        self._metadata = security.metadata
        self._channel = security.channel(
            worker.address,
            worker.pool,
            max_message_bytes=max_message_bytes,
            read_ahead_bytes=READ_AHEAD_BYTES,
        )
        self._prefill = PrefillServiceStub(self._channel)
        self._decode = DecodeServiceStub(self._channel)
        self._inboxes: dict[str, Inbox] = {}
        self._lost: UnavailableError | None = None

    @contextmanager
    def attached(self, attempt_id: str, inbox: Inbox) -> Iterator[None]:
        """Delivers outputs of this attempt, and the loss of the worker, to `inbox` meanwhile."""
        self._inboxes[attempt_id] = inbox
        if self._lost is not None:
            inbox.put(WorkerFailed(self.worker.key, self._lost))
        try:
            yield
        finally:
            del self._inboxes[attempt_id]

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve. Raises UnavailableError (WORKER_LOST) at once when the worker is dropped meanwhile."""
        request.coordinator_id = self._coordinator_id
        return await self._answer(self._decode.Reserve(request, timeout=timeout_s, metadata=self._metadata))

    async def prefill(self, request: prefill_pb2.PrefillRequest, timeout_s: float, inbox: Inbox) -> None:
        """Runs a Prefill call and puts what it says, its failure included, into `inbox`.

        Cancelling this cancels the call, as soon as the worker has it: one that never arrived would leave
        decode in doubt whether its ticket is used.
        """
        try:
            self._require_live()
            call = self._prefill.Prefill(request, timeout=timeout_s, metadata=self._metadata)
            arrived = asyncio.ensure_future(call.initial_metadata())
            try:
                complete = False
                await asyncio.shield(arrived)
                async for response in call:
                    if response.HasField("first_token"):
                        inbox.put(response.first_token)
                        complete = response.first_token.delta.finish_reason != 0
                    elif response.HasField("handoff"):
                        inbox.put(response.handoff)
                        complete = True
                if not complete:
                    raise UnavailableError(f"{self._name} ended a prefill early", reason="WORKER_LOST")
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                raise self._meaning(error) from None
            finally:
                await self._give_up(call, arrived)
        except SplitserveError as error:
            inbox.put(WorkerFailed(self.worker.key, error))

    async def _give_up(self, call: grpc.aio.Call, arrived: asyncio.Future[Any]) -> None:
        try:
            if not arrived.done() and self._lost is None:
                await asyncio.wait([arrived], timeout=ARRIVE_S)
        finally:
            call.cancel()
            arrived.cancel()

    async def abort(self, attempt_id: str, no_writer: bool) -> None:
        """Calls Abort with a deadline of its own. A failure is logged: the worker's lease ends the rest."""
        request = decode_pb2.AbortRequest(
            request_id=attempt_id, coordinator_id=self._coordinator_id, no_writer=no_writer
        )
        if self._lost is not None:
            return
        try:
            await self._answer(self._decode.Abort(request, timeout=ABORT_TIMEOUT_S, metadata=self._metadata))
        except SplitserveError as error:
            log_event("abort.failed", worker_id=self.worker.worker_id, reason=error.reason)

    async def watch_outputs(self, registry: Registry) -> None:
        """Keeps the output stream open until cancelled; opens it anew, with back-off, when it breaks."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._read_outputs(registry)
            except SplitserveError as error:
                log_event("outputs.broken", worker_id=self.worker.worker_id, reason=error.reason)
            if self.output_open:
                backoff_s = FIRST_BACKOFF_S
            self._set_output_open(registry, False)
            self._fail_all(UnavailableError(f"{self._name} went away", reason="WORKER_LOST"))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def connect(self) -> None:
        """Connects now, so that the first request need not wait for it."""
        self._channel.get_state(try_to_connect=True)

    def lose(self) -> None:
        """Fails every attempt here; nothing new can start."""
        self._lost = UnavailableError(f"{self._name} went away", reason="WORKER_LOST")
        self._fail_all(self._lost)

    async def close(self) -> None:
        """Closes the channel and what still runs on it."""
        await self._channel.close()

    async def _read_outputs(self, registry: Registry) -> None:
        request = decode_pb2.StreamOutputsRequest(coordinator_id=self._coordinator_id)
        call = self._decode.StreamOutputs(request, metadata=self._metadata)
        messages = aiter(call)
        try:
            async with asyncio.timeout(STREAM_OPEN_TIMEOUT_S):
                first = await anext(messages, None)
            if first is None:
                raise UnavailableError(f"{self._name} closed its output stream", reason="WORKER_LOST")
            if first.epoch != self.worker.epoch:
                # Another boot answers at this address; it will register under its own epoch.
                raise UnavailableError(f"{self._name} was restarted", reason="WORKER_LOST")
            self._set_output_open(registry, True)
            async for message in messages:
                for output in message.outputs:
                    self._deliver(output)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except TimeoutError:
            raise UnavailableError(f"{self._name} opens no output stream", reason="WORKER_LOST") from None
        finally:
            call.cancel()

    def _deliver(self, output: decode_pb2.SequenceOutput) -> None:
        inbox = self._inboxes.get(output.request_id)
        if inbox is None:  # ended here while the worker was still computing
            return
        if output.HasField("failure") or output.delta.finish_reason == generation_pb2.FINISH_REASON_ABORT:
            inbox.put(WorkerFailed(self.worker.key, _failure(output, self._name)))
        else:
            inbox.put(output, self._pulse)

    def _set_output_open(self, registry: Registry, is_open: bool) -> None:
        self.output_open = is_open
        registry.set_output_open(self.worker.key, is_open)

    def _fail_all(self, error: SplitserveError) -> None:
        for inbox in self._inboxes.values():
            inbox.put(WorkerFailed(self.worker.key, error))

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Any, T]) -> T:
        try:
            self._require_live()
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._meaning(error) from None
        finally:
            call.cancel()

    def _require_live(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _meaning(self, error: grpc.aio.AioRpcError | asyncio.CancelledError) -> BaseException:
        """What ended a call: its own status, a cancellation from outside, or `close`, which cancels too."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error)
        task = asyncio.current_task()
        cancelled_from_outside = task is None or task.cancelling() > 0
        return error if cancelled_from_outside or self._lost is None else self._lost

    @property
    def _name(self) -> str:
        return f"{self.worker.pool} worker {self.worker.worker_id}"


class WorkerLinks:
    """A link to every registered worker, kept in step with the registry by `run`."""

    def __init__(
        self,
        registry: Registry,
        background: Background,
        coordinator_id: str,
        max_message_bytes: int,
        security: PartSecurity = UNSECURED,
        pulse: Pulse | None = None,
    ) -> None:
        self._registry = registry
        self._pulse = pulse
        self._background = background
        self._coordinator_id = coordinator_id
        self._max_message_bytes = max_message_bytes
        self._security = security
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._watchers: dict[WorkerKey, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    def link_to(self, worker: Worker) -> WorkerLink:
        """The link to a worker. Raises UnavailableError (WORKER_LOST) if it has gone meanwhile."""
        link = self._links.get(worker.key)
        if link is None:
            raise UnavailableError(f"{worker.pool} worker {worker.worker_id} went away", reason="WORKER_LOST")
        return link

    async def run(self) -> None:
        """Opens and closes links as workers come and go, until cancelled; then closes them all."""
        try:
            async with self._group:
                version = -1
                while True:
                    version = await self._registry.wait_change(version)
                    self._reconcile()
        finally:
            for link in self._links.values():
                link.lose()
            await asyncio.gather(*(link.close() for link in self._links.values()))

    def _reconcile(self) -> None:
        wanted = {worker.key: worker for worker in self._registry.snapshot().workers}
        for key in self._links.keys() - wanted.keys():
            if watcher := self._watchers.pop(key, None):
                watcher.cancel()
            link = self._links.pop(key)
            link.lose()
            self._background.start(link.close())
        for key in wanted.keys() - self._links.keys():
            link = WorkerLink(
                wanted[key], self._coordinator_id, self._max_message_bytes, self._security, self._pulse
            )
            self._links[key] = link
            link.connect()
            if link.worker.pool == "decode":
                self._watchers[key] = self._group.create_task(link.watch_outputs(self._registry))
        for key, link in self._links.items():
            # A boot that registered again kept its link, and with it its open stream.
            self._registry.set_output_open(key, link.output_open)


def _failure(output: decode_pb2.SequenceOutput, who: str) -> SplitserveError:
    reason = output.failure.reason or "ABORTED"
    message = f"{who}: {output.failure.message or 'aborted the request'}"
    return failure_error(reason, message)
