"""What the tokens of a step mean for its sequences: how far they are computed, which go on, what clients are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from engine.kv_cache_manager import KVCacheManager
from engine.limits import RequestLimits
from engine.pending_result import PendingResult
from engine.runner import ModelRunner, PendingStep, RowsFailedError
from engine.sequence import Sequence, SequenceStatus
from engine.types import FinishReason, RequestOutput, SampledToken, StepResult
from splitserve.errors import InvalidArgumentError, SplitserveError


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step between its halves: tokens to compute for each sequence, and what waits for the runner's."""

    began_s: float
    num_new: Mapping[Sequence, int]
    result: StepResult
    tokens: PendingStep

    @classmethod
    def at(
        cls, runner: ModelRunner, began_s: float, num_new: Mapping[Sequence, int], result: StepResult
    ) -> BegunStep:
        """Queues a step at a runner, if there is anything to compute. A SplitserveError comes out of `tokens`."""
        if not num_new:
            return cls(began_s, num_new, result, list)
        try:
            tokens = runner.begin([sequence.scheduled(count) for sequence, count in num_new.items()])
        except SplitserveError as error:
            tokens = partial(_raise, error)
        return cls(began_s, num_new, result, tokens)


class StepOutcome:
    """Everything here decides who is in the next batch. Texts that do not are left to `PendingResult`."""

    def __init__(
        self,
        kv: KVCacheManager,
        limits: RequestLimits,
        pending: PendingResult,
        end: Callable[[Sequence], None],
    ) -> None:
        """`end` takes a live sequence out of everything and lets go of its blocks."""
        self._kv = kv
        self._limits = limits
        self._pending = pending
        self._end = end

    def take(self, step: BegunStep) -> None:
        """Waits for a step's tokens and adds to its result.

        Sequences that do not run any more were aborted meanwhile; nothing is said of them. Raises what the runner
        raises, but for a SplitserveError, which fails its requests.
        """
        batch, result = list(step.num_new), step.result
        try:
            sampled = step.tokens()
        except RowsFailedError as error:
            # The rest is scheduled again, as nothing of it counts as computed.
            self._fail_running([batch[row] for row in error.rows], error, result)
            return
        except SplitserveError as error:
            self._fail_running(batch, error, result)
            return
        for sequence, token in zip(batch, sampled, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.num_computed += step.num_new[sequence]
            self._kv.cache_computed(sequence)
            if sequence.request.prefill_only:
                result.progress.append(sequence.take_progress(self._kv.block_size))
            if token is not None:
                try:
                    result.outputs.append(self._on_token(sequence, token))
                except InvalidArgumentError as error:  # its grammar
                    self.fail(sequence, error.reason, error.message, result)

    def fail(self, sequence: Sequence, reason: str, message: str, result: StepResult) -> None:
        """Gives a live sequence up."""
        self._end(sequence)
        output = RequestOutput(sequence.request_id, sequence.num_output)
        output.finish_reason, output.failure = FinishReason.ABORT, (reason, message)
        result.outputs.append(output)

    def append(self, sequence: Sequence, token_id: int) -> tuple[bool, FinishReason | None]:
        """See `Sequence.append`."""
        # An answer that goes on elsewhere is not bound by this pool.
        limits, elsewhere = self._limits, sequence.request.prefill_only
        return sequence.append(token_id, limits.context_tokens if elsewhere else limits.sequence_tokens)

    def _fail_running(self, sequences: list[Sequence], error: SplitserveError, result: StepResult) -> None:
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self.fail(sequence, error.reason, error.message, result)

    def _on_token(self, sequence: Sequence, token: SampledToken) -> RequestOutput:
        output = RequestOutput(sequence.request_id, sequence.num_output, [token.token_id])
        if token.logprob is not None:
            output.logprobs.append(token.logprob)
        shows, output.finish_reason = self.append(sequence, token.token_id)
        if self._pending.late and not sequence.request.stop.stop_strings:
            self._pending.write_late(sequence, output, shows)
        else:
            self._pending.write(sequence, output, shows)
        if output.finish_reason is not None or sequence.request.prefill_only:
            self._end(sequence)
        return output


def _raise(error: SplitserveError) -> list[SampledToken | None]:
    raise error
