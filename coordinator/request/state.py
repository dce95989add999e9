"""The state of one request across its attempts. Written by `coordinator.request.observer` only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from coordinator.request.candidates import Candidate, FetchedPrefix
from coordinator.request.ids import random_hex
from coordinator.request.inference_request import InferenceRequest
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import SplitserveError
from splitserve.tracing.context import TraceContext
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2, prefill_pb2

LONGEST_NAME = 100
"""Leading characters of the client's request id that an attempt id contains."""
MAX_PAST_ATTEMPTS = 8
"""Ended attempts that are remembered: the first half of them, and the latest."""


@dataclass(frozen=True, slots=True)
class RequestEstimate:
    """Estimates made when a request arrives; see `coordinator.request.estimates`."""

    output_tokens: float
    """Expected output length, at most the request's `max_tokens`."""
    uncached_tokens: float
    """Prompt tokens that a prefill worker will have to compute."""
    hits: PrefixHits | None = None
    held_tokens: int | None = None
    """Cached prefixes by worker, and the longest one in any tier; None without a prefix index, or where it has gaps."""
    read_s: float = 0.0
    """Seconds for which that worker will read before, from its lower tiers."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a request waited for admission, by the pool that lacked capacity."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.prefill_s + other.prefill_s, self.decode_s + other.decode_s)


NO_WAITS = Waits()


@dataclass(slots=True)
class AttemptReport:
    """Measurements of one attempt, times in milliseconds. `decode_worker` is empty until that worker has sent output,
    `transport` until KV was transferred; `reserve_wait_ms`: of `reserve_ms`, for a step, blocks, lower tiers."""

    prefill_worker: str
    decode_worker: str = ""
    transport: str = ""
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    reserve_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_admit_ms: float = 0.0
    transfer_bytes: int = 0
    cached_prompt_tokens: int = 0
    decode_cached_tokens: int = 0
    worker_queue_ms: float = 0.0
    """Part of `queue_ms` that was spent on the worker that computed the prompt."""
    chunks: int = 0
    """Steps that the prefill worker computed the prompt in; 0: unknown."""
    reserved_blocks: int = 0
    """KV blocks that the ticket names."""
    descriptors: int = 0
    """Write descriptors posted."""

    def record_prefill(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill worker has computed the prompt."""
        self.queue_ms += first.queue_ms
        self.worker_queue_ms = first.queue_ms
        self.prefill_ms = first.compute_ms
        self.cached_prompt_tokens = first.cached_tokens
        self.chunks = first.chunks

    def record_local_prefill(self, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""
        self.queue_ms += local.queue_ms
        self.worker_queue_ms = local.queue_ms
        self.prefill_ms = local.compute_ms
        self.cached_prompt_tokens = self.decode_cached_tokens = local.cached_tokens

    def record_transfer(self, handoff: prefill_pb2.HandoffDone, transport: str) -> None:
        """The prefill worker has written all KV that the decode worker lacked."""
        if handoff.written_bytes:
            self.transport = transport
        self.transfer_ms = handoff.transfer_ms
        self.transfer_bytes = handoff.written_bytes
        self.descriptors = handoff.descriptors


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: the chosen workers, and what was measured."""

    attempt_id: str
    """Globally unique, because two clients may choose the same request id."""
    prefill: Worker
    decode: Worker | None
    """Snapshots from when the pair was chosen; no decode worker if the first token is the last."""
    expected_cached_tokens: int
    """Leading prompt tokens expected in the prefill worker's cache."""
    began_s: float
    """On the coordinator's monotonic clock."""
    suspect: WorkerKey
    """The worker at fault if the attempt fails now."""
    report: AttemptReport
    first_position: int = 0
    """Output tokens that earlier attempts had brought."""
    number: int = 1
    """Its number among the request's attempts, from 1."""
    candidates: tuple[Candidate, ...] = ()
    """See `Pair.candidates`."""
    trace: TraceContext | None = None
    """What its workers' spans are part of."""
    fetched: FetchedPrefix | None = None
    is_local: bool = False
    """Whether the decode worker computes the prompt itself."""
    reserving_s: float | None = None
    """When Reserve was called. This and the next ones on the coordinator's monotonic clock; None: not come to that."""
    prefilling_s: float | None = None
    """When the prompt was sent to the prefill worker."""
    prefilled_s: float | None = None
    """When the prompt was known to be computed."""
    decode_began_s: float | None = None
    """When the decode worker's first step was known."""
    ended_s: float | None = None
    failure: str = ""
    """Reason and message of the error that ended it; `suspect` is the worker at fault."""

    @property
    def has_fetched(self) -> bool:
        """Whether a prefix was brought from another worker's cache for it."""
        return self.fetched is not None and not self.fetched.failure

    @property
    def pair(self) -> tuple[WorkerKey, ...]:
        """Keys of the prefill worker and, if there is another one that decodes, of that."""
        alone = self.decode is None or self.decode.key == self.prefill.key
        return (self.prefill.key,) if alone or self.decode is None else (self.prefill.key, self.decode.key)

    @property
    def all_workers_responded(self) -> bool:
        """Whether all workers have sent output, given that some output has arrived: the first token comes first."""
        return self.decode is None or bool(self.report.decode_worker)

    @property
    def responsive_parts(self) -> list[tuple[WorkerKey, ...]]:
        """Workers that have sent output, and the pair if KV got across. Valid once output has arrived."""
        prefill = [(self.prefill.key,)] if self.report.prefill_worker else []
        decode = [(self.decode.key,)] if self.decode is not None and self.report.decode_worker else []
        return [*prefill, *decode, *([self.pair] if prefill and decode else [])]


@dataclass(slots=True)
class RequestState:
    """One request. Its output grows only by `append`, which accepts neither gaps nor duplicates."""

    request: InferenceRequest
    estimate: RequestEstimate
    """Made once, at arrival."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    attempts: int = 0
    fruitless_attempts: int = 0
    """Those that failed without a token since the last one that brought any."""
    failed_workers: set[WorkerKey] = field(default_factory=set)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    report: AttemptReport = field(default_factory=lambda: AttemptReport(""))
    """Merged over all attempts by `end_attempt`."""
    waits: Waits = NO_WAITS
    awaits_workers: bool = False
    """Whether it waits, or waited when it ended, for the first workers of a pool."""
    from_zero: bool = False
    """Whether it has waited for them."""
    current: AttemptRecord | None = None
    """The running or last attempt; None before the first."""
    past: list[AttemptRecord] = field(default_factory=list)
    """The ended attempts, at most MAX_PAST_ATTEMPTS of them."""
    tokenized_s: float = 0.0
    """When its prompt was tokenized, on the coordinator's monotonic clock."""
    admitted_s: float | None = None
    predicted_ttft_s: float = 0.0
    """When admission was over, and its forecast for a request that had to wait; 0: none."""
    longest_gap_s: float = 0.0
    """Longest time between two deltas, and the position of the token after it."""
    longest_gap_position: int = 0
    completed: bool = False
    """Whether the whole answer was sent."""

    @property
    def attempt(self) -> AttemptRecord:
        """The running or last attempt. Raises AssertionError before the first."""
        assert self.current is not None, "no attempt has begun"
        return self.current

    @property
    def finished(self) -> bool:
        """Whether the last token has been sent."""
        return self.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def needs_decode(self) -> bool:
        """Whether more than the one token that prefill samples may follow."""
        return self.request.max_tokens - len(self.token_ids) > 1

    @classmethod
    def of(cls, request: InferenceRequest, estimate: RequestEstimate, now: float) -> RequestState:
        """A request at its beginning, or where another coordinator left it. `now`: it has just been tokenized."""
        state = cls(request, estimate, list(request.resumed), request.resumed_finish, tokenized_s=now)
        if not state.finished and len(request.resumed) >= request.max_tokens:
            state.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        return state

    @property
    def sent_tokens(self) -> int:
        """Output tokens that this coordinator has sent."""
        return len(self.token_ids) - len(self.request.resumed)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, in seconds; 0 with fewer than two sent tokens."""
        count = self.sent_tokens
        if count < 2 or self.first_token_s is None:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (count - 1)

    def append(self, delta: generation_pb2.OutputDelta, now: float) -> None:
        """Appends the next delta. Raises SplitserveError (OUTPUT_GAP) unless it follows the previous one."""
        expected, first, token_ids = len(self.token_ids), delta.first_position, delta.token_ids
        if first != expected and (token_ids or first > expected):
            message = f"worker sent output from position {first}, {expected} is next"
            raise SplitserveError(message, reason="OUTPUT_GAP")
        if token_ids:
            self.token_ids.extend(token_ids)
            if self.first_token_s is None:
                self.first_token_s = now
            elif now - self.last_token_s > self.longest_gap_s:
                self.longest_gap_s, self.longest_gap_position = now - self.last_token_s, expected
            self.last_token_s = now
        self.finish_reason = delta.finish_reason

    def begin_attempt(
        self,
        prefill: Worker,
        decode: Worker | None,
        cached_tokens: int,
        now: float,
        candidates: tuple[Candidate, ...] = (),
    ) -> None:
        """Begins an attempt on these workers; `cached_tokens` of the prompt are expected in prefill's cache."""
        self.attempts += 1
        name = f"{self.request.request_id[:LONGEST_NAME]}.{self.attempts}.{random_hex(12)}"
        report, trace = AttemptReport(prefill.worker_id), self.request.trace
        self.current = AttemptRecord(
            attempt_id=name,
            prefill=prefill,
            decode=decode,
            expected_cached_tokens=cached_tokens,
            began_s=now,
            suspect=prefill.key,
            report=report,
            first_position=len(self.token_ids),
            number=self.attempts,
            candidates=candidates,
            trace=trace.attempt() if trace is not None else None,
        )

    def end_attempt(self, now: float) -> None:
        """Merges the ended attempt's report. Phases up to the first token stay those of the attempt that sent it."""
        self.attempt.ended_s = now
        if len(self.past) == MAX_PAST_ATTEMPTS:
            del self.past[MAX_PAST_ATTEMPTS // 2]
        self.past.append(self.attempt)
        total, attempt = self.report, self.attempt.report
        if total.prefill_ms == 0.0:
            total.queue_ms, total.reserve_ms = attempt.queue_ms, attempt.reserve_ms
            total.prefill_ms = attempt.prefill_ms
            total.cached_prompt_tokens = min(attempt.cached_prompt_tokens, len(self.request.prompt))
            total.decode_cached_tokens = min(attempt.decode_cached_tokens, len(self.request.prompt))
        total.transfer_ms = attempt.transfer_ms
        total.decode_admit_ms = attempt.decode_admit_ms
        total.transfer_bytes += attempt.transfer_bytes
        total.prefill_worker = attempt.prefill_worker
        total.decode_worker = attempt.decode_worker or total.decode_worker
        total.transport = attempt.transport or total.transport

    def started(self) -> inference_pb2.GenerationStart:
        """What a client needs to go on at another coordinator."""
        request = self.request
        return inference_pb2.GenerationStart(
            request_id=request.request_id,
            seed=request.sampling.seed,
            served_model=request.model.name,
            traceparent="" if request.trace is None else request.trace.context.traceparent,
        )

    def done(self) -> inference_pb2.GenerationDone:
        """The final message of the stream."""
        report, count = self.report, len(self.token_ids)
        first_s = self.first_token_s if self.first_token_s is not None else self.request.received_s
        return inference_pb2.GenerationDone(
            finish_reason=self.finish_reason,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                completion_tokens=count,
                cached_prompt_tokens=report.cached_prompt_tokens,
                decode_cached_tokens=report.decode_cached_tokens,
            ),
            timings=inference_pb2.PhaseTimings(
                queue_ms=report.queue_ms,
                prefill_ms=report.prefill_ms,
                transfer_ms=report.transfer_ms,
                decode_admit_ms=report.decode_admit_ms,
                ttft_ms=(first_s - self.request.received_s) * 1e3,
                tpot_ms=self.tpot_s * 1e3,
                reserve_ms=report.reserve_ms,
                transfer_bytes=report.transfer_bytes,
            ),
            served_by=inference_pb2.ServedBy(
                prefill_worker=report.prefill_worker,
                decode_worker=report.decode_worker,
                transport=report.transport,
                attempts=self.attempts,
                model=self.request.model.name,
            ),
            request_id=self.request.request_id,
            seed=self.request.sampling.seed,
            model=self.request.public_name or self.request.model.name,
        )


class Stage(enum.StrEnum):
    """What a request in progress is waiting for."""

    ADMITTING = "admitting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
