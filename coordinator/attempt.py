"""One try of one request on one pair of workers: reserve, prefill, and the deltas of both in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from coordinator.answer import Answer, AttemptReport
from coordinator.background import Background
from coordinator.gates import Passage
from coordinator.inbox import Inbox, WorkerEvent, WorkerFailed
from coordinator.pools import WorkerKey
from coordinator.random_pool import random_hex
from coordinator.request_record import RequestRecord
from coordinator.worker_links import WorkerLink
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2

ADMIT_WAIT_S = 5.0
"""How long after prefill's last acknowledged write decode may take to accept the completion. It comes with
that write, so this is time for a step of the decode worker, many times over."""
HANDOFF_REPORT_WAIT_S = 0.5
"""How long a finished answer waits for the prefill worker's report on the transfer."""
LONGEST_NAME = 100
MAX_MERGED_TOKENS = 1024
"""Keeps a merged piece, log-probabilities included, far below the message limit."""

RETRYABLE = (UnavailableError, FailedPreconditionError, CancelledByPeerError)
"""What says that this pair cannot, while another might. The rest is the request's own end."""


class Attempt:
    """Use: `reserve`, `start_prefill`, `next_delta` until None, `settle`; `close` in any case.

    All of them raise what the workers report, as SplitserveError; `culprit` then names the worker.
    """

    def __init__(
        self,
        answer: Answer,
        prefill: WorkerLink,
        decode: WorkerLink | None,
        background: Background,
        record: RequestRecord,
        local_prefill_tokens: int = 0,
        passages: Sequence[Passage] = (),
    ) -> None:
        generation = answer.generation
        # Unique among all attempts, for two clients may choose the same request id.
        self.attempt_id = f"{generation.request_id[:LONGEST_NAME]}.{answer.attempts}.{random_hex(12)}"
        self.report = AttemptReport(prefill.worker.worker_id)
        self.culprit: WorkerKey = prefill.worker.key
        self._generation = generation
        self._token_ids = (*generation.prompt, *answer.token_ids)
        self._prior = len(answer.token_ids)
        self._prefill, self._decode, self._background = prefill, decode, background
        self._record = record
        self._ticket: kv_transfer_pb2.KvTicket | None = None
        self._reserved = False
        self._local_prefill_tokens, self._is_local = local_prefill_tokens, False
        self._passages = passages
        self._inbox = Inbox(self._decoded)
        self._prefill_task: asyncio.Task[None] | None = None
        self._pending: deque[generation_pb2.OutputDelta] = deque()
        self._first_token_seen = self._decode_seen = self._finished = self._handoff_seen = False
        self._admitted = False
        self._written_s: float | None = None
        self._failure: WorkerFailed | None = None
        self._attached = ExitStack()
        for link in (prefill, decode):
            if link is not None:
                self._attached.enter_context(link.attached(self.attempt_id, self._inbox))

    async def reserve(self) -> None:
        """Sets KV blocks aside on the decode worker, if the answer needs one, and keeps the ticket.

        Without a ticket in its answer the decode worker computes the prompt itself.
        """
        if self._decode is None:
            return
        self.culprit = self._decode.worker.key
        self._reserved = True
        started_s, left_s = time.monotonic(), self._left_s()
        request = decode_pb2.ReserveRequest(
            request_id=self.attempt_id,
            token_ids=self._token_ids,
            prior_output_tokens=self._prior,
            sampling=self._generation.sampling,
            stop=self._generation.stop,
            priority=self._generation.priority,
            cache_salt=self._generation.caller.cache_salt,
            writer_agent_id=self._prefill.worker.agent_id,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._record.reserving()
        try:
            response = await self._decode.reserve(request, left_s)
        except (ResourceExhaustedError, FailedPreconditionError, InvalidArgumentError) as error:
            self._reserved = False  # refused, so there is nothing to abort
            if isinstance(error, ResourceExhaustedError):
                self._record.reserve_waited(time.monotonic() - started_s)
            raise
        except (asyncio.CancelledError, DeadlineExceededError):
            self._record.reserve_waited(time.monotonic() - started_s)
            raise
        reserve_s = time.monotonic() - started_s
        self.report.reserve_ms = reserve_s * 1e3
        # Of a prompt that is computed there, the answer comes when that has begun: its wait is the worker's word.
        self._record.reserve_waited(reserve_s if response.HasField("ticket") else response.wait_ms / 1e3)
        if response.HasField("ticket"):
            self._ticket = response.ticket
            self.report.decode_cached_tokens = response.ticket.cached_tokens
            return
        self._is_local = self._first_token_seen = self._handoff_seen = True  # all output comes from decode
        self.report.prefill_worker = ""

    def start_prefill(self) -> None:
        """Starts the Prefill call, with the ticket if there is one; nothing if decode computes the prompt."""
        self.report.queue_ms = (time.monotonic() - self._generation.received_s) * 1e3
        if self._is_local:
            self._record.decoding()
            # The answer to Reserve came while the prompt was being computed already.
            self.report.queue_ms -= self.report.reserve_ms
            self.report.reserve_ms = 0.0
            return
        self._record.prefilling()
        left_s = self._left_s()
        request = prefill_pb2.PrefillRequest(
            request_id=self.attempt_id,
            token_ids=self._token_ids,
            prior_output_tokens=self._prior,
            sampling=self._generation.sampling,
            stop=self._generation.stop,
            ticket=self._ticket,
            priority=self._generation.priority,
            cache_salt=self._generation.caller.cache_salt,
        )
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._prefill_task = self._background.start(self._prefill.prefill(request, left_s, self._inbox))

    async def next_delta(self) -> generation_pb2.OutputDelta | None:
        """The next piece of output, or None after the last one.

        The first token comes from prefill, at once; what decode has sent before it waits here. Pieces
        that gathered while the client was slow come as one.
        """
        while True:
            self._accept(self._inbox.take_all())
            if self._pending and self._first_token_seen:
                delta = _merged(self._pending)
                self._finished = delta.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED
                return delta
            if self._finished:
                return None
            if self._failure is not None:
                self.culprit = self._failure.worker
                raise self._failure.error
            await self._wait()

    async def settle(self) -> None:
        """After the last piece: waits a moment for the report on the transfer, if it is still to come."""
        if not self._decode_seen or self._handoff_seen or self._failure is not None:
            return
        try:
            async with asyncio.timeout(HANDOFF_REPORT_WAIT_S):
                while not self._handoff_seen and self._failure is None:
                    await self._inbox.wait()
                    self._accept(self._inbox.take_all())
        except TimeoutError:
            return  # the answer is complete without it

    def close(self) -> None:
        """Gives the attempt up at both workers unless they have ended it themselves. Never blocks."""
        self._attached.close()
        if self._prefill_task is not None:
            self._prefill_task.cancel()
        ended_by_decode = self._finished and self._decode_seen
        if self._decode is not None and self._reserved and not ended_by_decode:
            no_writer = self._prefill_task is None or self._written_s is not None
            self._background.start(self._decode.abort(self.attempt_id, no_writer))

    @property
    def pair(self) -> tuple[WorkerKey, ...]:
        """The prefill worker and, if the answer needs one, the decode worker."""
        decode = () if self._decode is None else (self._decode.worker.key,)
        return self._prefill.worker.key, *decode

    @property
    def took_part(self) -> list[tuple[WorkerKey, ...]]:
        """Who has shown to work: workers, and the pair if KV went from one to the other."""
        prefill = [] if self._is_local or not self._first_token_seen else [self.pair[:1]]
        decode = [self.pair[1:]] if self._decode_seen else []
        return [*prefill, *decode, *([self.pair] if prefill and decode else [])]

    @property
    def all_at_work(self) -> bool:
        """Whether output of all its workers has come."""
        return self._first_token_seen and (self._decode is None or self._decode_seen)

    def _decoded(self) -> None:
        """Its last output has come in, though the client may be far from it."""
        for passage in self._passages:
            passage.decoded()

    def _left_s(self) -> float:
        return max(1e-3, self._generation.deadline_s - time.monotonic())

    async def _wait(self) -> None:
        """Waits for an event. A completion that prefill has sent and decode never got counts as one."""
        if self._written_s is None or self._admitted or self._decode is None:
            await self._inbox.wait()
            return
        try:
            async with asyncio.timeout(self._written_s + ADMIT_WAIT_S - time.monotonic()):
                await self._inbox.wait()
        except TimeoutError:
            name = self._decode.worker.worker_id
            message = f"decode worker {name} did not get the completion of a handoff in {ADMIT_WAIT_S:g} s"
            error = UnavailableError(message, reason="COMPLETION_LOST")
            self._failure = WorkerFailed(self._decode.worker.key, error)

    def _accept(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            match event:
                case decode_pb2.SequenceOutput():  # first, for it is nearly always that
                    self._accept_output(event)
                case prefill_pb2.FirstToken():
                    self._first_token_seen = True
                    self._record.prefilled(event)
                    self._pending.appendleft(event.delta)
                    self.report.queue_ms += event.queue_ms
                    self.report.prefill_ms = event.compute_ms
                    self.report.cached_prompt_tokens = event.cached_tokens
                case prefill_pb2.HandoffDone():
                    self._handoff_seen = True
                    self._record.transferred(event)
                    self._written_s = time.monotonic()
                    if event.written_bytes:
                        self.report.transport = self._prefill.worker.transport
                    self.report.transfer_ms = event.transfer_ms
                    self.report.transfer_bytes = event.written_bytes
                case WorkerFailed():
                    self._note_failure(event)

    def _accept_output(self, output: decode_pb2.SequenceOutput) -> None:
        self._admitted = True
        if output.admitted:
            return
        if not self._decode_seen and self._decode is not None:
            self.report.decode_worker = self._decode.worker.worker_id
        self._decode_seen = True
        self._pending.append(output.delta)
        if output.HasField("admit_ms"):
            self._record.admitted(output.admit_ms)
            self.report.decode_admit_ms = output.admit_ms
        if output.HasField("local_prefill"):
            self._record.prefilled_locally(output.local_prefill)
            self.report.note_local_prefill(output.local_prefill)

    def _note_failure(self, event: WorkerFailed) -> None:
        # Once its token is here and decode has all KV, as its word or the report shows, prefill is over.
        prefill_over = self._first_token_seen and (self._admitted or self._handoff_seen)
        if event.worker == self._prefill.worker.key and prefill_over:
            self._handoff_seen = True
        elif self._failure is None:
            blamed = event.worker
            if event.error.reason == "TRANSFER_FAILED" and self._decode is not None:
                blamed = self._decode.worker.key  # who could not be written to
            self._failure = WorkerFailed(blamed, event.error)


def _merged(pending: deque[generation_pb2.OutputDelta]) -> generation_pb2.OutputDelta:
    """Takes a contiguous run off the front, as one delta."""
    first = pending.popleft()
    if not pending:
        return first
    merged = generation_pb2.OutputDelta()
    merged.CopyFrom(first)
    while pending and len(merged.token_ids) < MAX_MERGED_TOKENS:
        if pending[0].first_position != merged.first_position + len(merged.token_ids):
            break
        following = pending.popleft()
        merged.token_ids.extend(following.token_ids)
        merged.text += following.text
        merged.logprobs.extend(following.logprobs)
        merged.finish_reason = following.finish_reason
    return merged


def is_retryable(error: SplitserveError) -> bool:
    """Whether another pair of workers might do better."""
    return isinstance(error, RETRYABLE)
