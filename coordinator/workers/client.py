"""The coordinator's client of one worker: Reserve, Prefill and Abort, and, if it takes KV, its output stream.

Calls are carried by a stream that they share, which costs a fraction of a call, if the worker serves one. A long prompt
would hold back what comes after it, so it is a call of its own. A failure, a deadline and a cancellation are the same.

The output stream (`output_reader`) carries the tokens of all requests of this coordinator, into one collector per
attempt. When the registry drops a worker, its client is closed and every attempt that runs there fails at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.workers.output_collector import OutputCoalescer, OutputCollector, WorkerFailed
from coordinator.workers.output_reader import OutputReader
from coordinator.workers.snapshot import Worker
from splitserve.errors import CancelledByPeerError, DeadlineExceededError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.rpc.call_stream import MAX_CARRIED_BYTES, CallStream, CarriedCall
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, Metadata
from splitserve.rpc.status import error_from_rpc
from splitserve.runtime.cancellation import is_being_cancelled
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
"""Between two tries of an abort."""
UNDELIVERED = (UnavailableError, DeadlineExceededError, CancelledByPeerError)
ARRIVE_S = 2.0
"""How long cancelling a Prefill call of its own waits for the call to reach its worker first."""

T = TypeVar("T")
OnPrefill = Callable[[prefill_pb2.PrefillResponse], None]


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
        calls = coalescer or OutputCoalescer()
        self._calls = WorkerCalls(worker, self._channel, security.metadata, calls)
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

    @contextmanager
    def attached(self, attempt_id: str, collector: OutputCollector, *, decodes: bool) -> Iterator[None]:
        """While the context is open, delivers the loss of the worker to `collector`, and, if it `decodes` this attempt,
        the output. One that only computes the prompt would say on its next output stream that it has lost the attempt.
        """
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
        """Keeps the worker's streams open until cancelled; tells `on_open` of the output stream, if it has one."""
        async with asyncio.TaskGroup() as group:
            if self.worker.carries_calls:
                group.create_task(loops.run("calls", self._calls.run))
            if self.worker.takes_kv:
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
        lost = UnavailableError(f"{self.worker.name} went away", reason="WORKER_LOST")
        self._calls.lose(lost)
        for collector in self._collectors.values():
            collector.put(WorkerFailed(self.worker.key, lost))

    async def close(self) -> None:
        """Closes the channel and cancels the calls on it."""
        await self._channel.close()


class WorkerCalls:
    """Calls raise the SplitserveError of the worker's status; UnavailableError (WORKER_LOST) once it is lost."""

    def __init__(
        self, worker: Worker, channel: grpc.aio.Channel, metadata: Metadata, output: OutputCoalescer
    ) -> None:
        """`metadata` goes with each call. Those on the stream wait for each other as long as `output` says."""
        self._worker, self._metadata = worker, metadata
        self._prefill, self._decode = PrefillServiceStub(channel), DecodeServiceStub(channel)
        carry = partial(CallServiceStub(channel).Carry, metadata=metadata)
        self._stream = CallStream(carry, worker.name, output.call_wait_s)
        self._reserving: dict[str, Callable[[SplitserveError], None]] = {}
        """What fails a reservation that waits, by attempt id."""
        self.lost: UnavailableError | None = None
        """Set once the worker was dropped."""

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve."""
        self._require_live()
        try:
            if (data := self._carried(request)) is None:
                return await self._reserve_by_itself(request, timeout_s)
            responses: list[decode_pb2.ReserveResponse] = []
            call = self._stream.begin("reserve", data, timeout_s, partial(_read_reserved, responses))
            self._reserving[request.request_id] = call.fail
            await _end_of(call)
            if not responses:
                raise UnavailableError(f"{self._worker.name} ended a reservation early", reason="WORKER_LOST")
            return responses[0]
        finally:
            self._reserving.pop(request.request_id, None)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_response: OnPrefill
    ) -> None:
        """Calls Prefill until its end.

        Cancelling this cancels the call once it has reached the worker: if it never arrived, decode could not tell
        whether its ticket is in use.
        """
        self._require_live()
        if (data := self._carried(request)) is None:
            await self._prefill_by_itself(request, timeout_s, on_response)
        else:
            await _end_of(self._stream.begin("prefill", data, timeout_s, partial(_read_prefill, on_response)))

    async def abort(self, request: decode_pb2.AbortRequest, timeout_s: float) -> None:
        """Calls Abort. On the stream it cannot overtake the reservation that it ends."""
        self._require_live()
        if (data := self._carried(request)) is None:
            call = self._decode.Abort(request, timeout=timeout_s, metadata=self._metadata)
            await self._response(call)
        else:
            await _end_of(self._stream.begin("abort", data, timeout_s, _ignore))

    def fail_reservation(self, attempt_id: str, error: SplitserveError) -> bool:
        """Fails the Reserve call of an attempt. False if it has none."""
        fail = self._reserving.get(attempt_id)
        if fail is not None:
            fail(error)
        return fail is not None

    def lose(self, error: UnavailableError) -> None:
        """Fails the calls on the stream, and all that come; closing the channel fails the others."""
        self.lost = error
        self._stream.fail_all(error)

    def _carried(self, request: Message) -> bytes | None:
        """The request as the stream carries it; None if it has to be a call of its own."""
        if not self._worker.carries_calls:
            return None
        data = request.SerializeToString()
        return data if len(data) <= MAX_CARRIED_BYTES else None

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
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_response: OnPrefill
    ) -> None:
        call = self._prefill.Prefill(request, timeout=timeout_s, metadata=self._metadata)
        arrived = asyncio.ensure_future(call.initial_metadata())
        try:
            await asyncio.shield(arrived)
            async for response in call:
                on_response(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error) from None
        finally:
            await self._cancel_call(call, arrived)

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
        """Translates what ended a call: its status, a cancellation from outside, or `close`, which cancels too."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error)
        return error if is_being_cancelled() or self.lost is None else self.lost


async def _end_of(call: CarriedCall) -> None:
    try:
        await call.ended
    finally:
        call.cancel()


def _read_reserved(responses: list[decode_pb2.ReserveResponse], data: bytes) -> None:
    responses.append(decode_pb2.ReserveResponse.FromString(data))


def _read_prefill(on_response: OnPrefill, data: bytes) -> None:
    on_response(prefill_pb2.PrefillResponse.FromString(data))


def _ignore(_response: bytes) -> None:
    """What an Abort has ended does not matter."""
