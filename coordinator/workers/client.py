"""The coordinator's clients of its workers: Reserve, Prefill and Abort, and the output streams of decode workers.

Calls share a stream, on which a call costs a fraction of a gRPC call. A long prompt is a gRPC call of its own, since it
would delay the calls behind it. Failures, deadlines and cancellations are the same either way.

The output stream (`output_stream`) carries the tokens of all requests of this coordinator, into one collector per
attempt. When the registry drops a worker, its client is closed and every attempt that runs there fails at once.
`WorkerClients` has a client for every registered worker.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.workers.output_stream import OutputCoalescer, OutputCollector, OutputReader, WorkerFailed
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import CancelledByPeerError, DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.logs import log_event, log_exception
from splitserve.rpc.carried_calls import MAX_CARRIED_BYTES, CallStream, CarriedCall
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, Metadata
from splitserve.rpc.status import error_from_rpc
from splitserve.runtime.cancellation import end_tasks, is_being_cancelled
from splitserve.runtime.loops import LoopRunner
from splitserve.v1 import decode_pb2, prefill_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceStub
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub

ABORT_TIMEOUT_S = 2.0
"""How long one try of an abort waits for the worker's answer."""
READ_AHEAD_BYTES = 32 * 1024
"""Flow-control window of a channel: a few steps of a large batch. When the coordinator lags, the worker then merges
its output, instead of filling socket buffers with many small stale messages."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
"""First and longest pause between two tries of an abort."""
UNDELIVERED = (UnavailableError, DeadlineExceededError, CancelledByPeerError)
ARRIVE_S = 2.0
"""How long the cancellation of a Prefill call outside of the stream waits for the call to reach its worker first."""

T = TypeVar("T")
OnPrefill = Callable[[prefill_pb2.PrefillResponse], None]
OnEnd = Callable[[SplitserveError | None], None]


class BackgroundTasks:
    """Calls to workers that may outlive their request, so that cancelling a request does not cancel its clean-up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Number of running tasks."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a task. An exception in it is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, grace_s: float) -> None:
        """Waits up to `grace_s` for the tasks, then cancels the rest, without waiting for tasks that ignore it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await end_tasks(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_exception("background.failed", error)


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
        """`attachments` numbers the output streams of this coordinator, in rising order."""
        self.worker = worker
        self._coordinator_id = coordinator_id
        self._channel = security.channel(
            worker.address,
            "worker",
            max_message_bytes=max_message_bytes,
            read_ahead_bytes=READ_AHEAD_BYTES,
        )
        calls = coalescer or OutputCoalescer()
        self._calls = WorkerCalls(worker, self._channel, security.metadata, calls)
        self._decoding = asyncio.Event()
        self.follow(worker)
        self._collectors: dict[str, OutputCollector] = {}
        """Collectors of all attempts on this worker, by attempt id."""
        self._decoded: dict[str, OutputCollector] = {}
        """Collectors of the attempts that this worker decodes."""
        self.outputs = OutputReader(
            worker,
            DecodeServiceStub(self._channel),
            coordinator_id,
            security.metadata,
            self._decoded,
            attachments,
            coalescer,
        )

    @contextmanager
    def attached(self, attempt_id: str, collector: OutputCollector, *, decodes: bool) -> Iterator[None]:
        """While the context is open, delivers the loss of the worker to `collector`, and, if the worker `decodes` this
        attempt, the output. A worker that only computes the prompt would report the attempt as lost on its next output
        stream."""
        self._collectors[attempt_id] = collector
        if decodes:
            self._decoded[attempt_id] = collector
        if (lost := self._calls.lost) is not None:
            collector.put(WorkerFailed(self.worker.key, lost))
        try:
            yield
        finally:
            del self._collectors[attempt_id]
            self._decoded.pop(attempt_id, None)

    async def run(self, on_open: Callable[[bool], None], loops: LoopRunner) -> None:
        """Keeps the worker's streams open until cancelled. The output stream is opened once the worker decodes;
        `on_open` is told when it opens and breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(loops.run("calls", self._calls.run))
            await self._decoding.wait()
            group.create_task(loops.run("outputs", partial(self.outputs.run, on_open)))

    def follow(self, worker: Worker) -> None:
        """Takes the worker's present state, in which its role may have changed."""
        if worker.decodes:
            self._decoding.set()

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve. Raises UnavailableError: NO_OUTPUT_STREAM while the output stream is broken, WORKER_LOST as
        soon as the worker is dropped."""
        if not self.outputs.is_open:
            # The next output stream may have been requested already, without this attempt.
            message = f"the output stream of {self.worker.name} is broken"
            raise UnavailableError(message, reason="NO_OUTPUT_STREAM")
        request.coordinator_id = self._coordinator_id
        request.attachment = self.outputs.attachment
        return await self._calls.reserve(request, timeout_s)

    def prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        timeout_s: float,
        collector: OutputCollector,
        background: BackgroundTasks,
    ) -> Callable[[], object]:
        """Calls Prefill and puts its messages, or its failure, into `collector`. Returns what cancels the call; see
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

        def ended(error: SplitserveError | None) -> None:
            if error is None and not complete:
                error = UnavailableError(f"{self.worker.name} ended a prefill early", reason="WORKER_LOST")
            if error is not None:
                collector.put(WorkerFailed(self.worker.key, error))

        return self._calls.prefill(request, timeout_s, accept, ended, background)

    async def abort(self, attempt_id: str, no_writer: bool, deadline_s: float) -> None:
        """Calls Abort until the worker has answered or is dropped.

        A worker that comes back learns from its next output stream which requests are still wanted; one that does not
        come back ends them after its lease. At `deadline_s`, the request's deadline on the monotonic clock, the request
        ends by itself. `no_writer`: the prefill worker can no longer write, so blocks need no quarantine.
        """
        request = decode_pb2.AbortRequest(
            request_id=attempt_id, coordinator_id=self._coordinator_id, no_writer=no_writer
        )
        backoff_s = FIRST_BACKOFF_S
        while self._calls.lost is None:
            try:
                await self._calls.abort(request, ABORT_TIMEOUT_S)
                return
            except SplitserveError as error:
                log_event("abort.failed", worker_id=self.worker.worker_id, reason=error.reason)
                if not isinstance(error, UNDELIVERED) or time.monotonic() > deadline_s:
                    return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    def fail_all(self, error: SplitserveError) -> None:
        """Fails all attempts on this worker, which then resume elsewhere."""
        for attempt_id, collector in self._collectors.items():
            if not self._calls.fail_reservation(attempt_id, error):
                collector.put(WorkerFailed(self.worker.key, error))

    def connect(self) -> None:
        """Starts connecting, so that the first request does not wait for the connection."""
        self._channel.get_state(try_to_connect=True)

    def lose(self) -> None:
        """Fails all attempts on this worker; new calls fail at once."""
        lost = UnavailableError(f"{self.worker.name} went away", reason="WORKER_LOST")
        self._calls.lose(lost)
        for collector in self._collectors.values():
            collector.put(WorkerFailed(self.worker.key, lost))

    async def close(self) -> None:
        """Closes the channel and cancels the calls on it."""
        await self._channel.close()


class WorkerCalls:
    """The calls of one worker. They raise the SplitserveError of the worker's status; UnavailableError (WORKER_LOST)
    once the worker is lost."""

    def __init__(
        self, worker: Worker, channel: grpc.aio.Channel, metadata: Metadata, output: OutputCoalescer
    ) -> None:
        """`metadata` goes with each call. `output` says how long calls on the stream wait, to share a message."""
        self._worker, self._metadata = worker, metadata
        self._prefill, self._decode = PrefillServiceStub(channel), DecodeServiceStub(channel)
        carry = partial(CallServiceStub(channel).Carry, metadata=metadata)
        self._stream = CallStream(carry, worker.name, output.call_wait_s)
        self._reserving: dict[str, Callable[[SplitserveError], None]] = {}
        """Functions that fail a waiting reservation, by attempt id."""
        self.lost: UnavailableError | None = None
        """Set once the worker is dropped."""

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve."""
        self._require_live()
        try:
            if (data := _carried(request)) is None:
                return await self._reserve_by_itself(request, timeout_s)
            responses: list[bytes] = []
            call = self._stream.begin("reserve", data, timeout_s, responses.append)
            self._reserving[request.request_id] = call.fail
            await _end_of(call)
            if not responses:
                raise UnavailableError(f"{self._worker.name} ended a reservation early", reason="WORKER_LOST")
            return decode_pb2.ReserveResponse.FromString(responses[0])
        finally:
            self._reserving.pop(request.request_id, None)

    def prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        timeout_s: float,
        on_response: OnPrefill,
        on_end: OnEnd,
        background: BackgroundTasks,
    ) -> Callable[[], object]:
        """Begins to call Prefill, and returns what cancels the call. `on_end` gets the error of a call that has failed,
        or None; it is not called after a cancellation. A call on the stream needs no task.

        A cancellation cancels the call after it has reached the worker: if it never arrived, the decode worker could
        not tell whether its ticket is in use.
        """
        if self.lost is not None:
            on_end(self.lost)
            return lambda: None
        if (data := _carried(request)) is None:
            return background.start(self._prefill_by_itself(request, timeout_s, on_response, on_end)).cancel
        read = prefill_pb2.PrefillResponse.FromString
        call = self._stream.begin("prefill", data, timeout_s, lambda answer: on_response(read(answer)))

        def ended(future: asyncio.Future[None]) -> None:
            if not future.cancelled():
                error = future.exception()
                assert error is None or isinstance(error, SplitserveError)
                on_end(error)

        call.ended.add_done_callback(ended)
        return call.cancel

    async def abort(self, request: decode_pb2.AbortRequest, timeout_s: float) -> None:
        """Calls Abort and ignores its answer. On the stream it cannot overtake the reservation that it ends."""
        self._require_live()
        await _end_of(self._stream.begin("abort", request.SerializeToString(), timeout_s, lambda _: None))

    def fail_reservation(self, attempt_id: str, error: SplitserveError) -> bool:
        """Fails the Reserve call of an attempt. False if it has none."""
        fail = self._reserving.get(attempt_id)
        if fail is not None:
            fail(error)
        return fail is not None

    def lose(self, error: UnavailableError) -> None:
        """Fails the calls on the stream and all later ones; closing the channel fails the others."""
        self.lost = error
        self._stream.fail_all(error)

    async def _reserve_by_itself(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        call = self._decode.Reserve(request, timeout=timeout_s, metadata=self._metadata)
        failed: list[SplitserveError] = []

        def fail(error: SplitserveError) -> None:
            failed.append(error)
            call.cancel()

        self._reserving[request.request_id] = fail
        try:
            return await self._response(call)
        except asyncio.CancelledError:
            if not failed or is_being_cancelled():
                raise
            raise failed[0] from None

    async def _prefill_by_itself(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_response: OnPrefill, on_end: OnEnd
    ) -> None:
        call = self._prefill.Prefill(request, timeout=timeout_s, metadata=self._metadata)
        arrived = asyncio.ensure_future(call.initial_metadata())
        try:
            try:
                await asyncio.shield(arrived)
                async for response in call:
                    on_response(response)
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                raise self._translated(error) from None
            finally:
                await self._cancel_call(call, arrived)
        except SplitserveError as error:
            on_end(error)
        else:
            on_end(None)

    async def _cancel_call(self, call: grpc.aio.Call, arrived: asyncio.Future[Any]) -> None:
        try:
            if not arrived.done() and self.lost is None:
                await asyncio.wait([arrived], timeout=ARRIVE_S)
        finally:
            call.cancel()
            arrived.cancel()

    async def _response(self, call: grpc.aio.UnaryUnaryCall[Any, T]) -> T:
        try:
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error) from None
        finally:
            call.cancel()

    def _require_live(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _translated(self, error: grpc.aio.AioRpcError | asyncio.CancelledError) -> BaseException:
        """The error that ended a call: its status, a cancellation from outside, or the loss of the worker."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error)
        return error if is_being_cancelled() or self.lost is None else self.lost


def _carried(request: Message) -> bytes | None:
    """The request as the stream carries it; None if it is too long for the stream."""
    data = request.SerializeToString()
    return data if len(data) <= MAX_CARRIED_BYTES else None


async def _end_of(call: CarriedCall) -> None:
    try:
        await call.ended
    finally:
        call.cancel()


REOPEN_S = 1.0
"""Pause before another try to make a client."""


@dataclass(eq=False)
class WorkerClients:
    """A client for every registered worker, kept in step with the registry by `run`."""

    registry: Registry
    background: BackgroundTasks
    coordinator_id: str
    max_message_bytes: int
    security: ClusterCredentials = UNSECURED
    coalescer: OutputCoalescer | None = None
    loops: LoopRunner = field(default_factory=LoopRunner)

    def __post_init__(self) -> None:
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
                            version = await self.registry.wait_change(version)
        finally:
            clients = list(self._clients.values())
            self._clients.clear()
            self._watchers.clear()
            for client in clients:
                client.lose()
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    def _reconcile(self, group: asyncio.TaskGroup) -> bool:
        """Returns False if a worker's client could not be made, which may succeed later."""
        wanted = {worker.key: worker for worker in self.registry.snapshot().workers}
        for key in self._clients.keys() - wanted.keys():
            if watcher := self._watchers.pop(key, None):
                watcher.cancel()
            client = self._clients.pop(key)
            client.lose()
            self.background.start(client.close())
        for key in wanted.keys() - self._clients.keys():
            self._open(wanted[key], group)
        for key, client in self._clients.items():
            client.follow(wanted[key])
            # A boot that registered again keeps its client and its open stream.
            self.registry.set_output_open(key, client.outputs.is_open)
        return len(self._clients) == len(wanted)

    def _open(self, worker: Worker, group: asyncio.TaskGroup) -> None:
        try:
            client = WorkerClient(
                worker,
                self.coordinator_id,
                self.max_message_bytes,
                self._attachments,
                self.security,
                self.coalescer,
            )
            client.connect()
        except Exception as error:  # a wrong address or certificate of one worker must not affect the others
            log_exception("worker.no_client", error, worker_id=worker.worker_id)
            return
        self._clients[worker.key] = client
        on_open = partial(self.registry.set_output_open, worker.key)
        self._watchers[worker.key] = group.create_task(client.run(on_open, self.loops))
