"""Applies a step's tokens to its sequences: progress, finish reasons, text and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from engine.core.engine import FinishReason, RequestLimits, RequestOutput, StepResult
from engine.core.model_runner import (
    ModelRunner,
    PendingStep,
    RowsFailedError,
    SampledToken,
    ScheduledSequence,
)
from engine.core.scheduler import SchedulerOutput
from engine.core.sequence import Sequence, SequenceStatus
from splitserve.errors import BrokenInvariantError, InvalidArgumentError, SplitserveError
from splitserve.models.tokenizer import Tokenizer
from splitserve.queues import LazyHeap
from splitserve.rpc.status import GRAMMAR_FAILED, request_error

AfterAnswer = Callable[[StepResult], None]
"""Goes on with a sequence whose grammar has taken its last token; adds the sequence's outputs to the result."""


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step between its halves: tokens to compute for each sequence, and the function that waits for the results."""

    began_s: float
    num_new: Mapping[Sequence, int]
    result: StepResult
    tokens: PendingStep


def begin_at(runner: ModelRunner, batch: list[ScheduledSequence]) -> PendingStep:
    """Queues a batch, which may be empty, at a runner. The returned function raises a SplitserveError of the runner."""
    try:
        return runner.begin(batch) if batch else list
    except SplitserveError as error:
        return partial(_raise, error)


class OutputProcessor:
    """Applies the tokens that the next batch depends on. Text that does not affect it is left to `PendingResult`."""

    def __init__(
        self,
        block_size: int,
        cache_computed: Callable[[Sequence], None],
        limits: RequestLimits,
        pending: PendingResult,
        end: Callable[[Sequence], None],
        defer: Callable[[Sequence, AfterAnswer], None],
    ) -> None:
        """`cache_computed` puts a sequence's computed blocks into the prefix cache; `end` removes a live sequence from
        the engine and frees its blocks; `defer` stores the function to call once a sequence's grammar has answered."""
        self._block_size = block_size
        self._cache_computed = cache_computed
        self._limits = limits
        self._pending = pending
        self._end = end
        self._defer = defer

    def batch(self, step: SchedulerOutput, result: StepResult) -> list[ScheduledSequence]:
        """The runner's view of a step. Sequences that cannot be scheduled leave the step and fail. Sequences in their
        first step are recorded as started."""
        batch: list[ScheduledSequence] = []
        for sequence, num_new in list(step.num_new.items()):
            try:
                batch.append(sequence.scheduled(num_new))
            except BaseException as error:
                step.fail(sequence, error)
        for sequence, why in step.failed:
            self.fail(sequence, why.reason, why.message, result)
        for sequence in step.num_new:
            if not sequence.started:
                sequence.started = True
                result.started[sequence.request_id] = sequence.cached_tokens
        return batch

    def process(self, step: BegunStep) -> None:
        """Waits for a step's tokens and adds its outputs and progress to its result.

        Sequences that no longer run were aborted meanwhile and are skipped. A SplitserveError of the runner fails the
        requests; any other exception propagates.
        """
        batch, result = list(step.num_new), step.result
        try:
            sampled = step.tokens()
        except RowsFailedError as error:
            # The other sequences did not advance, so they are scheduled again.
            self._fail_running([batch[row] for row in error.rows], error, result)
            return
        except SplitserveError as error:
            self._fail_running(batch, error, result)
            return
        for sequence, token in zip(batch, sampled, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            try:
                self._advance(sequence, step.num_new[sequence], token, result)
            except BaseException as error:  # raised by the sequence's grammar or text
                self._fail_with(sequence, error, result)

    def fail(self, sequence: Sequence, reason: str, message: str, result: StepResult) -> None:
        """Ends a live sequence with an error."""
        self._end(sequence)
        output = RequestOutput(sequence.request_id, sequence.num_output)
        output.finish_reason, output.failure = FinishReason.ABORT, (reason, message)
        result.outputs.append(output)

    def append_given(self, sequence: Sequence, token_id: int) -> RequestOutput | None:
        """Appends the first token of a handoff; the worker that sampled it has emitted its text.

        Ends the sequence and returns its last output if the answer ends with that token, else None. Also returns None
        if its grammar must answer first.
        """
        if self._asks(sequence, token_id):
            self._defer(sequence, lambda result: result.add(self._append_given(sequence, token_id)))
            return None
        return self._append_given(sequence, token_id)

    def follow(self, sequence: Sequence, then: AfterAnswer, result: StepResult) -> None:
        """Goes on with a sequence whose grammar has answered, or not in time."""
        try:
            if sequence.matcher is not None and not sequence.matcher.wait():
                message = "sampling.grammar: its next token takes too long to find"
                raise InvalidArgumentError(message, reason=GRAMMAR_FAILED, field="sampling.grammar")
            then(result)
        except BaseException as error:
            self._fail_with(sequence, error, result)

    def _fail_with(self, sequence: Sequence, error: BaseException, result: StepResult) -> None:
        known = request_error(error, sequence.request_id, sequence.request.trace)
        self.fail(sequence, known.reason, known.message, result)

    def _asks(self, sequence: Sequence, token_id: int) -> bool:
        """Hands a token to the sequence's grammar if there is one; returns whether the grammar must answer first."""
        if sequence.matcher is None or sequence.ends_by(token_id):
            return False
        sequence.matcher.advance([token_id])
        return True

    def _append_given(self, sequence: Sequence, token_id: int) -> RequestOutput | None:
        has_text, reason = self._append(sequence, token_id)
        rest, stopped = self._pending.text_after(sequence, token_id, has_text, reason)
        reason = FinishReason.STOP if stopped else reason
        if reason is None:
            return None
        self._end(sequence)
        return RequestOutput(sequence.request_id, sequence.num_output, text=rest, finish_reason=reason)

    def expire(self, deadlines: LazyHeap[float, Sequence], now: float, result: StepResult) -> None:
        """Fails the live sequences whose deadlines have passed; ending one takes it out of `deadlines`."""
        while (first := deadlines.peek()) is not None and first[0] <= now:
            sequence = first[1]
            message = f"the request's deadline passed while it was {sequence.status.value}"
            self.fail(sequence, "DEADLINE_EXCEEDED", message, result)

    def _append(self, sequence: Sequence, token_id: int) -> tuple[bool, FinishReason | None]:
        """Appends a token as `Sequence.append` does, within the limits of this pool."""
        # A prefill-only answer continues on another worker: this pool does not bound it.
        limits, elsewhere = self._limits, sequence.request.prefill_only
        return sequence.append(token_id, limits.context_tokens if elsewhere else limits.sequence_tokens)

    def _fail_running(self, sequences: list[Sequence], error: SplitserveError, result: StepResult) -> None:
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self.fail(sequence, error.reason, error.message, result)

    def _advance(
        self, sequence: Sequence, num_new: int, token: SampledToken | None, result: StepResult
    ) -> None:
        sequence.num_computed += num_new
        self._cache_computed(sequence)
        if token is not None and self._asks(sequence, token.token_id):
            self._defer(sequence, lambda result: self._emit(sequence, token, result))
        else:
            self._emit(sequence, token, result)

    def _emit(self, sequence: Sequence, token: SampledToken | None, result: StepResult) -> None:
        if sequence.request.prefill_only:
            result.progress.append(sequence.take_progress(self._block_size))
        if token is not None:
            result.add(self._on_token(sequence, token))

    def _on_token(self, sequence: Sequence, token: SampledToken) -> RequestOutput:
        """Appends a sampled token, and ends the sequence if that ends its answer."""
        output = RequestOutput(sequence.request_id, sequence.num_output, [token.token_id])
        output.prompt_logprobs = sequence.prompt_logprobs
        if token.logprob is not None:
            output.logprobs.append(token.logprob)
        has_text, output.finish_reason = self._append(sequence, token.token_id)
        # Text is detokenized while the device computes the next step, unless it may end the answer.
        if self._pending.late and not sequence.request.stop.stop_strings:
            self._pending.defer_text(sequence, output, has_text)
        else:
            self._pending.add_text(sequence, output, has_text)
        if output.finish_reason is not None or sequence.request.prefill_only:
            self._end(sequence)
        return output


def _raise(error: SplitserveError) -> list[SampledToken | None]:
    raise error


class PendingResult:
    """The result of the latest step, until it is taken, and its deferred texts. Used on the engine thread."""

    def __init__(self, tokenizer: Tokenizer, end_if_live: Callable[[Sequence], None], *, late: bool) -> None:
        self._end_if_live = end_if_live
        self.late = late
        """Whether texts that cannot end their answers are deferred to `take`."""
        self._tokenizer = tokenizer
        self._result: StepResult | None = None
        self._deferred: list[tuple[Sequence, RequestOutput, bool]] = []

    def add_text(self, sequence: Sequence, output: RequestOutput, has_text: bool) -> None:
        """Adds the text of an output's token, if it `has_text`; a stop string ends the answer."""
        text = sequence.text(self._tokenizer)
        if has_text:
            output.text, stopped = text.push(output.token_ids[0])
            if stopped:
                output.finish_reason = FinishReason.STOP
        if output.finish_reason is not None:
            output.text += text.flush()  # empty after a stop string

    def text_after(
        self, sequence: Sequence, token_id: int, has_text: bool, reason: FinishReason | None
    ) -> tuple[str, bool]:
        """What is left to emit once a token has been whose text was emitted elsewhere, and whether a stop string ends
        the answer with it. `reason`: why the answer ends otherwise."""
        text = sequence.text(self._tokenizer)
        if has_text and text.push(token_id)[1]:
            return "", True
        return (text.flush() if reason is FinishReason.LENGTH else ""), False

    def defer_text(self, sequence: Sequence, output: RequestOutput, has_text: bool) -> None:
        """Leaves `add_text` for `take`."""
        self._deferred.append((sequence, output, has_text))

    def put(self, result: StepResult) -> None:
        """Stores the result of a finished step."""
        if self._result is not None:
            raise BrokenInvariantError("the previous step's result has not been taken")
        self._result = result

    @property
    def result(self) -> StepResult:
        """The result that is taken next, for outputs that come between two steps."""
        if self._result is None:
            self._result = StepResult()
        return self._result

    @property
    def can_wait(self) -> bool:
        """Whether the result is for clients only. A result with KV is taken at once: a peer waits for it, and packing
        or checksumming it would queue behind the next step on the device."""
        return self._result is not None and not self._result.progress

    def take(self) -> StepResult | None:
        """Returns the result with all its texts, and forgets it; None if there is none.

        A sequence whose text cannot be made fails.
        """
        deferred, self._deferred = self._deferred, []
        for sequence, output, has_text in deferred:
            try:
                self.add_text(sequence, output, has_text)
            except BaseException as error:
                known = request_error(error, sequence.request_id, sequence.request.trace)
                output.token_ids, output.logprobs, output.text = [], [], ""
                output.finish_reason, output.failure = FinishReason.ABORT, (known.reason, known.message)
                self._end_if_live(sequence)
        result, self._result = self._result, None
        return result

    def holds(self, request_id: str) -> bool:
        """Whether the result has an output of this request."""
        return self._result is not None and any(o.request_id == request_id for o in self._result.outputs)

    def drop(self, request_id: str) -> bool:
        """Removes the outputs of a request; returns whether there were any."""
        if self._result is None or not self._result.drop(request_id):
            return False
        self._deferred = [entry for entry in self._deferred if entry[1].request_id != request_id]
        return True
