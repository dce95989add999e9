"""What a client has been sent of one answer so far, across attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.pools import WorkerKey
from coordinator.request_validation import Generation
from splitserve.errors import SplitserveError
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2


@dataclass(slots=True)
class AttemptReport:
    """Who served one attempt, where its time went in milliseconds, what caches held in tokens.

    `decode_worker` is empty until that worker has sent output, `transport` until KV was shipped.
    """

    prefill_worker: str
    decode_worker: str = ""
    transport: str = ""
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_admit_ms: float = 0.0
    transfer_bytes: int = 0
    cached_prompt_tokens: int = 0
    decode_cached_tokens: int = 0

    def note_local_prefill(self, local: decode_pb2.LocalPrefill) -> None:
        """The decode worker has computed the prompt itself."""
        self.queue_ms += local.queue_ms
        self.prefill_ms = local.compute_ms
        self.decode_cached_tokens = local.cached_tokens


@dataclass(slots=True)
class Answer:
    """The answer to one request. It grows by `append` alone, which admits no gap and no duplicate."""

    generation: Generation
    token_ids: list[int] = field(default_factory=list)
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    attempts: int = 0
    failed_workers: set[WorkerKey] = field(default_factory=set)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    report: AttemptReport = field(default_factory=lambda: AttemptReport(""))
    """Of all attempts together, as `note_attempt` merges them."""

    @property
    def finished(self) -> bool:
        """Whether the last token has been sent."""
        return self.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def needs_decode(self) -> bool:
        """Whether more than the one token that a prefill samples may follow."""
        return self.generation.max_tokens - len(self.token_ids) > 1

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 with fewer than two."""
        count = len(self.token_ids)
        if count < 2 or self.first_token_s is None:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (count - 1)

    def append(self, delta: generation_pb2.OutputDelta, now: float) -> None:
        """Takes the next piece. Raises SplitserveError (OUTPUT_GAP) unless it follows on the last one."""
        expected = len(self.token_ids)
        if delta.first_position != expected and (delta.token_ids or delta.first_position > expected):
            message = f"worker sent output from position {delta.first_position}, {expected} is next"
            raise SplitserveError(message, reason="OUTPUT_GAP")
        if delta.token_ids:
            self.token_ids.extend(delta.token_ids)
            self.last_token_s = now
            if self.first_token_s is None:
                self.first_token_s = now
        self.finish_reason = delta.finish_reason

    def note_attempt(self, attempt: AttemptReport) -> None:
        """Merges an ended attempt: phases up to the first token stay those of the attempt that sent it."""
        ours = self.report
        if ours.prefill_ms == 0.0:
            ours.queue_ms, ours.reserve_ms = attempt.queue_ms, attempt.reserve_ms
            ours.prefill_ms = attempt.prefill_ms
            ours.cached_prompt_tokens = min(attempt.cached_prompt_tokens, len(self.generation.prompt))
            ours.decode_cached_tokens = min(attempt.decode_cached_tokens, len(self.generation.prompt))
        ours.transfer_ms = attempt.transfer_ms
        ours.decode_admit_ms = attempt.decode_admit_ms
        ours.transfer_bytes += attempt.transfer_bytes
        ours.prefill_worker = attempt.prefill_worker
        ours.decode_worker = attempt.decode_worker or ours.decode_worker
        ours.transport = attempt.transport or ours.transport

    def done(self) -> inference_pb2.GenerationDone:
        """The stream's last message."""
        report, count = self.report, len(self.token_ids)
        first_s = self.first_token_s if self.first_token_s is not None else self.generation.received_s
        return inference_pb2.GenerationDone(
            finish_reason=self.finish_reason,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self.generation.prompt),
                completion_tokens=count,
                cached_prompt_tokens=report.cached_prompt_tokens,
                decode_cached_tokens=report.decode_cached_tokens,
            ),
            timings=inference_pb2.PhaseTimings(
                queue_ms=report.queue_ms,
                prefill_ms=report.prefill_ms,
                transfer_ms=report.transfer_ms,
                decode_admit_ms=report.decode_admit_ms,
                ttft_ms=(first_s - self.generation.received_s) * 1e3,
                tpot_ms=self.tpot_s * 1e3,
                reserve_ms=report.reserve_ms,
                transfer_bytes=report.transfer_bytes,
            ),
            served_by=inference_pb2.ServedBy(
                prefill_worker=report.prefill_worker,
                decode_worker=report.decode_worker,
                transport=report.transport,
                attempts=self.attempts,
                model=self.generation.model.name,
            ),
            request_id=self.generation.request_id,
            seed=self.generation.sampling.seed,
            model=self.generation.public_name or self.generation.model.name,
        )
