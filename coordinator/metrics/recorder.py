"""Records one request in the statistics: each sample once, as it happens, however the request ends."""

from __future__ import annotations

import asyncio
import time

from coordinator.metrics.stats import ModelStats, Outcome, RequestStats
from coordinator.request.inference_request import InferenceRequest
from coordinator.request.observer import RequestObserver
from coordinator.request.state import RequestState, Stage
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError
from splitserve.v1 import decode_pb2, prefill_pb2, scaling_pb2

COLD_REQUESTS = 3
"""Requests after a worker's boot that count as cold: they pay for first memory access, kernel compilation and
connection setup, and say nothing about how many workers are needed."""


class StatsRecorder(RequestObserver):
    """Observes one request. Nothing is counted before `arrived`.

    A sample is cold if a worker it depends on is cold (see `COLD_REQUESTS`), or if the request needed more than one
    attempt: then it measures a fault, not the load.
    """

    def __init__(self, stats: RequestStats) -> None:
        self._all_stats = stats
        self._stats: ModelStats | None = None
        self._stage: Stage | None = None
        self._uncached = 0.0
        self._attempts = 0
        self._cold_prefill = self._cold_decode = False
        self._first_token_seen = self._completed = False

    def arrived(self, state: RequestState) -> None:
        """See RequestObserver. Demand is counted from the request's estimate, once for what was refused and comes
        again."""
        request, self._uncached = state.request, state.estimate.uncached_tokens
        self._stats = self._all_stats.of(request.model.name)
        if not self._all_stats.refused.take(_what(request), time.monotonic()):
            self._stats.arrived(len(request.prompt), self._uncached, state.estimate.output_tokens)
        self._enter(Stage.ADMITTING)

    def routed(self, state: RequestState) -> None:
        """See RequestObserver. Admission waits count in the phase of the pool that lacked capacity."""
        attempt, decode = state.attempt, state.attempt.decode
        self._attempts = state.attempts
        # A wait for the first workers measures their start, not the load.
        self._cold_prefill = state.from_zero or attempt.prefill.total_requests < COLD_REQUESTS
        self._cold_decode = decode is not None and decode.total_requests < COLD_REQUESTS
        if self._attempts == 1:
            held_s = state.waits.prefill_s + state.waits.decode_s
            admit_s = time.monotonic() - state.request.received_s - held_s
            self._add(scaling_pb2.PHASE_ADMIT, admit_s, cold=False)

    def reserving(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._enter(Stage.RESERVING)

    def reserve_ended(self, state: RequestState, waited_s: float) -> None:
        """See RequestObserver."""
        held_s = state.waits.decode_s if self._attempts == 1 else 0.0
        self._add(scaling_pb2.PHASE_RESERVE, waited_s + held_s, self._cold_decode)

    def prefilling(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._enter(Stage.PREFILLING)

    def prefilled(self, state: RequestState, first: prefill_pb2.FirstToken) -> None:
        """See RequestObserver."""
        self._enter(Stage.DECODING)
        cold = self._cold_prefill
        queue_s = first.queue_ms / 1e3 + (state.waits.prefill_s if self._attempts == 1 else 0.0)
        self._add(scaling_pb2.PHASE_PREFILL_QUEUE, queue_s, cold)
        self._add(scaling_pb2.PHASE_PREFILL_COMPUTE, first.compute_ms / 1e3, cold)
        self._add(scaling_pb2.PHASE_PREFILL, queue_s + first.compute_ms / 1e3, cold)

    def prefilling_locally(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._enter(Stage.DECODING)

    def prefilled_locally(self, state: RequestState, local: decode_pb2.LocalPrefill) -> None:
        """See RequestObserver."""
        seconds = (local.queue_ms + local.compute_ms) / 1e3
        self._add(scaling_pb2.PHASE_LOCAL_PREFILL, seconds, self._cold_decode)

    def transferred(self, state: RequestState, handoff: prefill_pb2.HandoffDone) -> None:
        """See RequestObserver."""
        if handoff.written_bytes:
            self._add(scaling_pb2.PHASE_TRANSFER, handoff.transfer_ms / 1e3, self._cold)

    def decode_began(self, state: RequestState, admit_ms: float) -> None:
        """See RequestObserver."""
        self._add(scaling_pb2.PHASE_DECODE_ADMIT, admit_ms / 1e3, self._cold_decode)

    def sent(self, state: RequestState, output_tokens: int) -> None:
        """See RequestObserver."""
        if not self._first_token_seen and state.first_token_s is not None:
            self._first_token_seen = True
            ttft_s = state.first_token_s - state.request.received_s
            self._add_ttft(state, ttft_s)

    def completed(self, state: RequestState) -> None:
        """See RequestObserver."""
        self._completed = True
        if state.sent_tokens > 1:
            self._add(scaling_pb2.PHASE_TPOT, state.tpot_s, self._cold_decode)

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """See RequestObserver."""
        if self._stats is None:
            return
        self._enter(None)
        # A client may hang up as soon as it has the last token; that still counts as completed.
        outcome = scaling_pb2.OUTCOME_COMPLETED if self._completed else outcome_of(error)
        self._stats.outcomes[outcome] += 1
        if self._first_token_seen:
            self._stats.looked_up_tokens += len(state.request.prompt)
            self._stats.hit_tokens["prefill"] += state.report.cached_prompt_tokens
            self._stats.hit_tokens["decode"] += state.report.decode_cached_tokens
        if outcome == scaling_pb2.OUTCOME_REJECTED:
            self._all_stats.refused.add(_what(state.request), time.monotonic())
        if outcome == scaling_pb2.OUTCOME_TIMED_OUT and not self._first_token_seen:
            waited_s = time.monotonic() - state.request.received_s
            self._add_ttft(state, waited_s)

    @property
    def _cold(self) -> bool:
        return self._cold_prefill or self._cold_decode

    def _add_ttft(self, state: RequestState, seconds: float) -> None:
        self._add(scaling_pb2.PHASE_TTFT, seconds, self._cold)
        if len(state.request.prompt) >= self._all_stats.long_prompt_tokens:
            self._add(scaling_pb2.PHASE_TTFT_LONG, seconds, self._cold)
        elif self._stats is not None:
            self._stats.short_ttft.add(max(0.0, seconds), cold=self._cold or self._attempts > 1)

    def _add(self, phase: scaling_pb2.Phase.ValueType, seconds: float, cold: bool) -> None:
        if self._stats is not None:
            self._stats.phases[phase].add(max(0.0, seconds), cold=cold or self._attempts > 1)

    def _enter(self, stage: Stage | None) -> None:
        """Moves the request from its stage to `stage`; None: out of all stages."""
        stats = self._stats
        if stats is None:
            return
        if self._stage is not None:
            stats.in_stage[self._stage] -= 1
        if self._stage is Stage.PREFILLING:
            stats.prefilling_tokens -= self._uncached
        self._stage = stage
        if stage is not None:
            stats.in_stage[stage] += 1
        if stage is Stage.PREFILLING:
            stats.prefilling_tokens += self._uncached
        if not stats.in_stage[Stage.PREFILLING]:
            stats.prefilling_tokens = 0.0  # discards accumulated rounding errors


def outcome_of(error: BaseException | None) -> Outcome:
    """How a request ended that raised `error`."""
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


def _what(request: InferenceRequest) -> tuple[object, ...]:
    """What makes two requests equal for `RefusedRequests`."""
    return request.model.name, request.caller.tenant, request.prompt, request.max_tokens
