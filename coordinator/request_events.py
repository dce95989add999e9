"""What happens to a request: `RequestEvents` writes its state, counts it in the statistics, and has its record kept."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from coordinator.request.inference_request import InferenceRequest
from coordinator.request.state import Candidate, RequestState, Stage
from coordinator.telemetry.record_keeper import RecordKeeper, failure_text
from coordinator.telemetry.request_stats import ModelStats, Phase, RequestStats, outcome_of
from coordinator.workers.snapshot import Worker
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import TokenDelta
from splitserve.logs import log_exception
from splitserve.v1 import decode_pb2, prefill_pb2, scaling_pb2

BATCH_TOKENS = 8
"""Tokens of a stream that are reported to `RequestControl` at once, half a KV block or less."""
COLD_REQUESTS = 3
"""Requests after a worker's boot that count as cold: they pay for first memory access, kernel compilation and
connection setup, and say nothing about how many workers are needed."""


class RequestControl(Protocol):
    """Receives the events of one request by which decisions are made."""

    def output_sent(self, tokens: int) -> None:
        """`tokens` more tokens were sent to the client. The first two deltas of each attempt are reported at once,
        later ones BATCH_TOKENS at a time, the rest at its end."""

    def decoded(self) -> None:
        """The decode worker holds nothing for the request any more."""

    def ended(self, error: BaseException | None) -> None:
        """The request is over."""


class RequestEvents:
    """The events of one request, roughly in the order in which they occur; leaving the context ends the request.

    Each event writes the state, then the statistics. Events that come on several paths and by which decisions are made
    go to `control`; the request flow makes all other calls itself. Nothing is counted before `arrived`. A sample is
    cold if it depends on a cold worker (see `COLD_REQUESTS`), or if the request needed more than one attempt: it then
    measures a fault, not the load.
    """

    __slots__ = (
        "_all_stats",
        "_batch_tokens",
        "_batches",
        "_cold_decode",
        "_cold_prefill",
        "_pending_tokens",
        "_records",
        "_stage",
        "_stats",
        "_ttft_counted",
        "control",
        "state",
    )

    def __init__(self, state: RequestState, records: RecordKeeper | None = None) -> None:
        self.state = state
        self.control: RequestControl | None = None
        self._records = records
        self._all_stats: RequestStats | None = None
        self._stats: ModelStats | None = None
        self._stage: Stage | None = None
        self._cold_prefill = self._cold_decode = self._ttft_counted = False
        self._pending_tokens, self._batch_tokens = 0, 1
        """Sent tokens that are not reported yet, and how many of them are reported at once."""
        self._batches = 0
        """Reports of sent tokens in this attempt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._report_sent()
        if self.control is not None:
            self.control.ended(error)
        self._count_end(error)
        if self._records is not None:
            try:
                self._records.ended(self.state, error)
            except Exception as failure:  # a record that cannot be made must not fail the request
                log_exception("record.failed", failure)

    def arrived(self, stats: RequestStats) -> None:
        """The request is valid and within its quotas: it counts as demand from now on, served or not. Demand is counted
        by the request's estimate, and only once for a refused request that is sent again."""
        request, estimate = self.state.request, self.state.estimate
        self._all_stats, self._stats = stats, stats.of(request.model.name)
        if not stats.refused.take(_identity(request), time.monotonic()):
            self._stats.arrived(len(request.prompt), estimate.uncached_tokens, estimate.output_tokens)
        self._enter(Stage.ADMITTING)
        if self._records is not None:
            self._records.arrived(self.state)

    def routed(
        self,
        prefill: Worker,
        decode: Worker | None,
        cached_tokens: int,
        now: float,
        candidates: tuple[Candidate, ...] = (),
    ) -> None:
        """Begins an attempt on these workers; `cached_tokens` of the prompt are expected in prefill's cache."""
        state = self.state
        state.begin_attempt(prefill, decode, cached_tokens, now, candidates)
        self._batches, self._batch_tokens = 0, 1
        # A wait for the first workers measures their start, not the load.
        self._cold_prefill = state.from_zero or prefill.total_requests < COLD_REQUESTS
        self._cold_decode = decode is not None and decode.total_requests < COLD_REQUESTS
        if state.attempts == 1:
            # Admission waits count in the phase of the pool that lacked capacity.
            held_s = state.waits.prefill_s + state.waits.decode_s
            self._add(scaling_pb2.PHASE_ADMIT, now - state.request.received_s - held_s, cold=False)

    def reserving(self, now: float) -> None:
        """Reserve is being called on the decode worker."""
        self.state.attempt.reserving_s = now
        self._enter(Stage.RESERVING)

    def reserve_ended(self, waited_s: float) -> None:
        """The reservation was made, or given up, after `waited_s` seconds."""
        held_s = self.state.waits.decode_s if self.state.attempts == 1 else 0.0
        self._add(scaling_pb2.PHASE_RESERVE, waited_s + held_s, self._cold_decode)

    def prefilling(self, now: float) -> None:
        """The prompt is being sent to the prefill worker."""
        self.state.attempt.prefilling_s = now
        self._enter(Stage.PREFILLING)

    def prefilled(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill worker has sent the first token."""
        attempt, cold = self.state.attempt, self._cold_prefill
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_prefill(first)
        self._enter(Stage.DECODING)
        queue_s = first.queue_ms / 1e3 + (self.state.waits.prefill_s if self.state.attempts == 1 else 0.0)
        self._add(scaling_pb2.PHASE_PREFILL_QUEUE, queue_s, cold)
        self._add(scaling_pb2.PHASE_PREFILL_COMPUTE, first.compute_ms / 1e3, cold)
        self._add(scaling_pb2.PHASE_PREFILL, queue_s + first.compute_ms / 1e3, cold)

    def prefilling_locally(self) -> None:
        """The decode worker computes the prompt itself; the prefill worker is not called.

        A prompt that only relieves busy prefill workers remains demand of the prefill pool, as does one on a worker of
        role `both`, which is in that pool.
        """
        state, decode = self.state, self.state.attempt.decode
        state.attempt.is_local = True
        is_local_demand = decode is not None and decode.role == "decode" and not state.relieves_prefill
        if self._stats is not None and state.attempts == 1 and is_local_demand:
            self._stats.local_requests += 1
            self._stats.local_tokens += state.estimate.uncached_tokens
        self._enter(Stage.DECODING)

    def prefilled_locally(self, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""
        attempt = self.state.attempt
        attempt.prefilled_s = time.monotonic()
        attempt.report.record_local_prefill(local)
        seconds = (local.queue_ms + local.compute_ms) / 1e3
        self._add(scaling_pb2.PHASE_LOCAL_PREFILL, seconds, self._cold_decode)

    def transferred(self, handoff: prefill_pb2.HandoffDone) -> None:
        """The last KV write was acknowledged. May precede or follow the first decode output."""
        attempt = self.state.attempt
        attempt.report.record_transfer(handoff, attempt.prefill.transport)
        if handoff.written_bytes:
            self._add(scaling_pb2.PHASE_TRANSFER, handoff.transfer_ms / 1e3, self._cold)
        if self._records is not None:
            self._records.transferred(self.state, handoff)

    def decode_began(self, admit_ms: float) -> None:
        """The decode worker has made its first step, `admit_ms` milliseconds after it received the KV."""
        attempt = self.state.attempt
        attempt.decode_began_s = time.monotonic()
        attempt.report.decode_admit_ms = admit_ms
        self._add(scaling_pb2.PHASE_DECODE_ADMIT, admit_ms / 1e3, self._cold_decode)

    def sent(self, delta: TokenDelta, now: float) -> None:
        """Appends a delta that is about to be sent to the client.

        Raises SplitserveError (OUTPUT_GAP), and counts nothing, unless the delta follows the previous one.
        """
        self.state.append(delta, now)
        self._pending_tokens += len(delta.token_ids)
        if self._pending_tokens >= self._batch_tokens:
            self._report_sent()

    def decoded(self) -> None:
        """The decode worker has finished; its output may not have been sent to the client yet."""
        if self.control is not None:
            self.control.decoded()

    def attempt_failed(self, error: SplitserveError) -> None:
        """The attempt has failed."""
        self._report_sent()
        self.state.attempt.failure = failure_text(error)

    def attempt_ended(self) -> None:
        """The attempt is over, whether completed, failed or cancelled."""
        self._report_sent()
        self.state.end_attempt(time.monotonic())

    def completed(self) -> None:
        """The whole answer was sent, except for the final `done` message."""
        self.state.completed = True
        if self.state.sent_tokens > 1:
            self._add(scaling_pb2.PHASE_TPOT, self.state.tpot_s, self._cold_decode)

    @property
    def _cold(self) -> bool:
        return self._cold_prefill or self._cold_decode

    def _report_sent(self) -> None:
        """Reports the tokens sent since the last report: many tokens are no more work than one."""
        if not (count := self._pending_tokens):
            return
        self._pending_tokens = 0
        self._batches += 1
        self._batch_tokens = 1 if self._batches < 2 else BATCH_TOKENS
        if self.control is not None:
            self.control.output_sent(count)
        first_s = self.state.first_token_s
        if not self._ttft_counted and first_s is not None:
            self._count_ttft(first_s - self.state.request.received_s)

    def _count_ttft(self, seconds: float) -> None:
        self._ttft_counted = True
        self._add(scaling_pb2.PHASE_TTFT, seconds, self._cold)
        if self._all_stats is None or self._stats is None:
            return
        if len(self.state.request.prompt) >= self._all_stats.long_prompt_tokens:
            self._add(scaling_pb2.PHASE_TTFT_LONG, seconds, self._cold)
        else:
            self._stats.short_ttft.add(max(0.0, seconds), cold=self._cold or self.state.attempts > 1)

    def _count_end(self, error: BaseException | None) -> None:
        state, stats = self.state, self._stats
        if stats is None or self._all_stats is None:
            return
        self._enter(None)
        # A client may hang up as soon as it has the last token; that still counts as completed.
        outcome = scaling_pb2.OUTCOME_COMPLETED if state.completed else outcome_of(error)
        stats.outcomes[outcome] += 1
        if state.first_token_s is not None:
            stats.looked_up_tokens += len(state.request.prompt)
            stats.hit_tokens["prefill"] += state.report.cached_prompt_tokens
            stats.hit_tokens["decode"] += state.report.decode_cached_tokens
        elif outcome == scaling_pb2.OUTCOME_TIMED_OUT:
            self._count_ttft(time.monotonic() - state.request.received_s)
        if outcome == scaling_pb2.OUTCOME_REJECTED:
            self._all_stats.refused.add(_identity(state.request), time.monotonic())

    def _add(self, phase: Phase, seconds: float, cold: bool) -> None:
        if self._stats is not None:
            self._stats.phases[phase].add(max(0.0, seconds), cold=cold or self.state.attempts > 1)

    def _enter(self, stage: Stage | None) -> None:
        """Moves the request to `stage`; None: out of all stages."""
        if self._stats is not None:
            self._stats.move(self._stage, stage, self.state.estimate.uncached_tokens)
            self._stage = stage


def _identity(request: InferenceRequest) -> tuple[object, ...]:
    """The tuple by which two requests are equal for `RefusedRequests`."""
    return request.model.name, request.caller.tenant, request.prompt, request.max_tokens
