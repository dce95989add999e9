"""One request's entries in the signal book: made as things happen, each once, whatever way the request ends."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from coordinator.answer import Answer
from coordinator.gates import NO_WAITS, Waits
from coordinator.pools import Worker
from coordinator.request_validation import Generation
from coordinator.signal_book import ModelBook, Outcome, SignalBook, Stage
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError
from splitserve.v1 import decode_pb2, prefill_pb2, scaling_pb2

COLD_REQUESTS = 3
"""The first requests that a worker gets after its boot: memory is touched, kernels are compiled and connections are
opened for the first time. What they take says nothing about how many workers are needed."""


class RequestRecord:
    """A context around one request. Nothing is counted before `arrived`.

    A sample is cold when a worker it depends on is (see `COLD_REQUESTS`), or when the request needed more than
    one attempt: then it measures a fault, not the load.
    """

    def __init__(self, book: SignalBook, received_s: float) -> None:
        self._signals = book
        self._received_s = received_s
        self._book: ModelBook | None = None
        self._stage: Stage | None = None
        self._uncached = 0.0
        self._prompt_tokens = 0
        self._attempts = 0
        self._waits = NO_WAITS
        self._cold_prefill = self._cold_decode = False
        self._first_token_seen = self._completed = False

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._book is None:
            return
        self._enter(None)
        # A client may hang up as soon as it has the last token.
        outcome = scaling_pb2.OUTCOME_COMPLETED if self._completed else _outcome(error)
        self._book.outcomes[outcome] += 1
        if outcome == scaling_pb2.OUTCOME_TIMED_OUT and not self._first_token_seen:
            self._add(scaling_pb2.PHASE_TTFT, time.monotonic() - self._received_s, self._cold)

    def arrived(self, generation: Generation) -> None:
        """The prompt has been accepted: this is demand now, served or not."""
        self._book = self._signals.of(generation.model.name)
        self._prompt_tokens = len(generation.prompt)
        self._uncached = self._book.arrived(self._prompt_tokens, generation.max_tokens)
        self._enter(Stage.ADMITTING)

    def passed(self, waits: Waits) -> None:
        """A gate has let the request in. What it waited for counts in the phase of the pool that had no room."""
        self._waits = self._waits + waits

    def chosen(self, prefill: Worker, decode: Worker | None) -> None:
        """An attempt has got its workers."""
        self._attempts += 1
        self._cold_prefill = prefill.total_requests < COLD_REQUESTS
        self._cold_decode = decode is not None and decode.total_requests < COLD_REQUESTS
        if self._attempts == 1:
            held_s = self._waits.prefill_s + self._waits.decode_s
            self._add(scaling_pb2.PHASE_ADMIT, time.monotonic() - self._received_s - held_s, cold=False)

    def reserving(self) -> None:
        """The decode worker was asked for KV blocks."""
        self._enter(Stage.RESERVING)

    def reserve_waited(self, seconds: float) -> None:
        """So long it took until there were blocks, or until the request could wait no longer."""
        held_s = self._waits.decode_s if self._attempts == 1 else 0.0
        self._add(scaling_pb2.PHASE_RESERVE, seconds + held_s, self._cold_decode)

    def prefilling(self) -> None:
        """The prompt goes to the prefill worker."""
        self._enter(Stage.PREFILLING)

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill worker has sent the first token."""
        self._enter(Stage.DECODING)
        cold = self._cold_prefill
        queue_s = first.queue_ms / 1e3 + (self._waits.prefill_s if self._attempts == 1 else 0.0)
        self._add(scaling_pb2.PHASE_PREFILL_QUEUE, queue_s, cold)
        self._add(scaling_pb2.PHASE_PREFILL_COMPUTE, first.compute_ms / 1e3, cold)
        self._add(scaling_pb2.PHASE_PREFILL, queue_s + first.compute_ms / 1e3, cold)
        if self._book is not None and self._attempts == 1:
            self._book.cached_share.add(min(1.0, first.cached_tokens / max(1, self._prompt_tokens)))

    def decoding(self) -> None:
        """The decode worker computes the prompt itself."""
        self._enter(Stage.DECODING)

    def prefilled_locally(self, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""
        seconds = (local.queue_ms + local.compute_ms) / 1e3
        self._add(scaling_pb2.PHASE_LOCAL_PREFILL, seconds, self._cold_decode)

    def transferred(self, handoff: prefill_pb2.HandoffDone) -> None:
        """The last KV byte was acknowledged."""
        if handoff.written_bytes:
            self._add(scaling_pb2.PHASE_TRANSFER, handoff.transfer_ms / 1e3, self._cold)

    def admitted(self, admit_ms: float) -> None:
        """The decode worker has made its first step."""
        self._add(scaling_pb2.PHASE_DECODE_ADMIT, admit_ms / 1e3, self._cold_decode)

    def sent(self, answer: Answer) -> None:
        """A piece of the answer went to the client."""
        if not self._first_token_seen and answer.first_token_s is not None:
            self._first_token_seen = True
            self._add(scaling_pb2.PHASE_TTFT, answer.first_token_s - self._received_s, self._cold)

    def completed(self, answer: Answer) -> None:
        """All of the answer was sent."""
        self._completed = True
        if self._book is None:
            return
        count = len(answer.token_ids)
        self._book.expected_output.add(count)
        if count > 1:
            self._add(scaling_pb2.PHASE_TPOT, answer.tpot_s, self._cold_decode)

    @property
    def _cold(self) -> bool:
        return self._cold_prefill or self._cold_decode

    def _add(self, phase: scaling_pb2.Phase.ValueType, seconds: float, cold: bool) -> None:
        if self._book is not None:
            self._book.phases[phase].add(max(0.0, seconds), cold=cold or self._attempts > 1)

    def _enter(self, stage: Stage | None) -> None:
        """Moves the request from its stage to the next one; None: out."""
        book = self._book
        if book is None:
            return
        if self._stage is not None:
            book.in_stage[self._stage] -= 1
        if self._stage is Stage.PREFILLING:
            book.prefilling_tokens -= self._uncached
        self._stage = stage
        if stage is not None:
            book.in_stage[stage] += 1
        if stage is Stage.PREFILLING:
            book.prefilling_tokens += self._uncached
        if not book.in_stage[Stage.PREFILLING]:
            book.prefilling_tokens = 0.0  # no rounding error outlives the last of them


def _outcome(error: BaseException | None) -> Outcome:
    match error:
        case None:
            return scaling_pb2.OUTCOME_COMPLETED
        case asyncio.CancelledError():
            return scaling_pb2.OUTCOME_CANCELLED
        case ResourceExhaustedError():
            return scaling_pb2.OUTCOME_REJECTED
        case DeadlineExceededError():
            return scaling_pb2.OUTCOME_TIMED_OUT
    return scaling_pb2.OUTCOME_FAILED
