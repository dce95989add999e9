"""Reads the output stream of one decode worker for all attempts that run there, and resumes it when it breaks.

While the stream is broken the worker goes on, and keeps what it produces. The next stream says for each attempt what
has been received; the worker sends the rest, or says that it has lost the request. Attempts are failed, and so resumed
on other workers, only when that takes too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import grpc

from coordinator.workers.output_collector import OutputCoalescer, OutputCollector, WorkerFailed
from coordinator.workers.snapshot import Worker
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.logs import log_event, log_exception
from splitserve.rpc.credentials import Metadata
from splitserve.rpc.status import error_from_rpc, failure_error
from splitserve.v1 import decode_pb2, generation_pb2

if TYPE_CHECKING:
    from splitserve.v1.decode_pb2_grpc import DecodeServiceAsyncStub

OPEN_TIMEOUT_S = 5.0
MAX_DETACHED_S = 5.0
"""How long attempts wait for a broken stream to be open again; less if the worker's lease is shorter."""
ACKNOWLEDGE_S = 1.0
"""Time between two acknowledgements, while output comes. The worker keeps what it sent in between."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0


class OutputReader:
    """The output streams of one boot of one decode worker, one after the other."""

    def __init__(
        self,
        worker: Worker,
        stub: DecodeServiceAsyncStub,
        coordinator_id: str,
        metadata: Metadata,
        collectors: Mapping[str, OutputCollector],
        numbers: Iterator[int],
        coalescer: OutputCoalescer | None,
    ) -> None:
        """`collectors` has those of the attempts that decode here, by attempt id; `numbers` counts all streams of this
        coordinator."""
        self.is_open = False
        self.attachment = 0
        """Number of the present stream, or of the last one."""
        self._worker, self._stub = worker, stub
        self._coordinator_id, self._metadata = coordinator_id, metadata
        self._collectors, self._numbers, self._coalescer = collectors, numbers, coalescer
        self._lease_s = 0.0
        """How long the worker keeps requests without a stream, as the present or last stream said."""
        self._received = self._acknowledged = 0
        """Messages of the present stream."""
        self._giving_up: asyncio.TimerHandle | None = None

    async def run(self, on_open: Callable[[bool], None]) -> None:
        """Keeps the stream open until cancelled; tells `on_open` when it is open and when it has broken."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._acknowledge())
                await self._keep_open(on_open)
        finally:
            self._stop_waiting()

    def fail_all(self, error: SplitserveError) -> None:
        """Fails all attempts that decode here."""
        for collector in self._collectors.values():
            collector.put(WorkerFailed(self._worker.key, error))

    async def _keep_open(self, on_open: Callable[[bool], None]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._read(on_open)
            except SplitserveError as error:
                log_event("outputs.broken", worker_id=self._worker.worker_id, reason=error.reason)
            except Exception as error:  # what one worker sends must not end the streams of the others
                log_exception("outputs.broken", error, worker_id=self._worker.worker_id)
            if self.is_open:
                self.is_open = False
                backoff_s = FIRST_BACKOFF_S
                on_open(False)
                self._wait_for_next()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _read(self, on_open: Callable[[bool], None]) -> None:
        number = next(self._numbers)
        request = decode_pb2.StreamOutputsRequest(
            coordinator_id=self._coordinator_id,
            attachment=number,
            requests=[
                decode_pb2.AttachedRequest(request_id=name, next_position=collector.next_position)
                for name, collector in self._collectors.items()
                if not collector.ended
            ],
        )
        call = self._stub.StreamOutputs(request, metadata=self._metadata)
        messages = aiter(call)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(messages, None)
            if first is None:
                raise UnavailableError(f"{self._worker.name} closed its output stream", reason="WORKER_LOST")
            self._opened(number, first)
            on_open(True)
            async for message in messages:
                self._accept(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except TimeoutError:
            raise UnavailableError(
                f"{self._worker.name} opens no output stream", reason="WORKER_LOST"
            ) from None
        finally:
            call.cancel()

    def _opened(self, number: int, first: decode_pb2.StreamOutputsResponse) -> None:
        if first.epoch != self._worker.epoch:
            # Another boot responds at this address; it will register under its own epoch.
            error = UnavailableError(f"{self._worker.name} was restarted", reason="WORKER_LOST")
            self.fail_all(error)
            raise error
        self._stop_waiting()
        self._lease_s = first.lease.ToNanoseconds() / 1e9
        self.attachment = number
        self._received = self._acknowledged = 0
        self.is_open = True
        log_event("outputs.open", worker_id=self._worker.worker_id, attempts=len(self._collectors))

    def _accept(self, message: decode_pb2.StreamOutputsResponse) -> None:
        for name in message.lost_request_ids:
            if (collector := self._collectors.get(name)) is not None:
                error = UnavailableError(f"{self._worker.name} has lost the request", reason="REQUEST_LOST")
                collector.put(WorkerFailed(self._worker.key, error))
        if message.outputs:
            self._received += 1
        for output in message.outputs:
            self._deliver(output)

    def _deliver(self, output: decode_pb2.SequenceOutput) -> None:
        collector = self._collectors.get(output.request_id)
        if collector is None:  # the attempt was closed while the worker was still computing
            return
        if output.HasField("failure") or output.delta.finish_reason == generation_pb2.FINISH_REASON_ABORT:
            collector.put(WorkerFailed(self._worker.key, _failure(output, self._worker.name)))
        else:
            collector.put(output, self._coalescer)

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            received = self._received
            if not self.is_open or not self._lease_s or received == self._acknowledged:
                continue
            request = decode_pb2.AcknowledgeOutputsRequest(
                coordinator_id=self._coordinator_id, attachment=self.attachment, messages=received
            )
            try:
                await self._stub.AcknowledgeOutputs(request, timeout=OPEN_TIMEOUT_S, metadata=self._metadata)
            except grpc.aio.AioRpcError:
                continue  # the next one says it, too
            if request.attachment == self.attachment:
                self._acknowledged = received

    def _wait_for_next(self) -> None:
        """The stream has broken: its attempts wait for the next one, if the worker keeps them."""
        wait_s = min(MAX_DETACHED_S, self._lease_s)
        self._giving_up = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        self.fail_all(UnavailableError(f"{self._worker.name} went away", reason="WORKER_LOST"))

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


def _failure(output: decode_pb2.SequenceOutput, who: str) -> SplitserveError:
    reason = output.failure.reason or "ABORTED"
    message = f"{who}: {output.failure.message or 'aborted the request'}"
    return failure_error(reason, message)
