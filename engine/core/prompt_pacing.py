"""The token clock beside the scheduler: asks it for prompt tokens, and tells it when streams got theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.core.sequence import Sequence, SequenceStatus
from engine.core.step_stats import StepMeter
from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import StreamPace, TokenClock


class PromptPacing:
    """Paces prompts by the targets of the streams beside them. Without targets, or before steps are measured, nothing
    is paced."""

    def __init__(self, meter: StepMeter, *, separate: bool) -> None:
        """`separate`: prompts get steps of their own, because a mixed step takes longer than both of its parts."""
        self.separate = separate
        self.active = False
        """Whether there was a request with targets. Until then nothing needs to be asked or told."""
        self.clock = TokenClock()
        self._meter = meter
        self._step_s = 0.0
        self._chunk_before = False
        """Whether prompt tokens were computed since the latest step that decoded."""

    def grant(self, now: float, decodes: Iterable[Sequence], first: Sequence | None) -> int | None:
        """Prompt tokens of the next step, where `first` is the first prompt; 0: the step only decodes.

        None where nothing is paced: no prompt, no stream with a target, or no measured step times.
        """
        if first is None:
            self.clock.nothing_waits()
            return None
        running, streams, context = 1, [], 0  # the prompt that is computed joins them
        for sequence in decodes:
            running += 1
            context += sequence.num_computed
            if sequence.pace is not None:
                streams.append(sequence.pace)
        decode_fit, prompt_fit = self._meter.fit.latest, self._prompt_fit()
        if not streams or decode_fit is None or prompt_fit is None:
            return None
        self._step_s = decode_fit.step_s(running, context)
        targets = first.request.targets
        return self.clock.grant(
            now,
            streams,
            self._step_s,
            prompt_fit,
            remaining=first.remaining,
            context_tokens=first.num_computed,
            ttft_s=None if targets is None else targets.ttft_s,
            mixed=not self.separate,
        )

    def admitted(self, sequence: Sequence, now: float) -> None:
        """A stream goes on here whose first token another worker computed."""
        sequence.pace = _pace(sequence, now)

    def stepped(self, now: float, num_new: Mapping[Sequence, int]) -> None:
        """A step ended that computed `num_new` tokens of each sequence."""
        streams = [
            (sequence, tokens)
            for sequence, tokens in num_new.items()
            if sequence.request.targets is not None
            and sequence.status is SequenceStatus.RUNNING
            and sequence.remaining == 1
            and sequence.num_output
        ]
        self._chunk_before |= any(tokens > 1 for tokens in num_new.values())
        timed = late = 0
        for sequence, tokens in streams:
            pace = sequence.pace
            if pace is None or tokens > 1:  # its first token, or one after it had to be computed again
                sequence.pace = _pace(sequence, now)
                continue
            if self._chunk_before and self._step_s < pace.tpot_s:
                timed += 1
                late += now > self.clock.due_s(pace, self._step_s)
            pace.emitted(now)
        self.clock.margin.record(now, timed, late)
        if any(tokens == 1 for tokens in num_new.values()):
            self._chunk_before = False

    def _prompt_fit(self) -> PromptFit | None:
        """The fit, or what the mean rate says, which counts decodes beside prompts as their time: it errs upwards."""
        rate = self._meter.rates.prefill_tokens_per_s
        return self._meter.prompt_fit.latest or (PromptFit(0.0, 1 / rate, 0.0) if rate else None)


def _pace(sequence: Sequence, now: float) -> StreamPace | None:
    """The pace of a stream whose first token came now; None without a target."""
    targets = sequence.request.targets
    return None if targets is None or targets.tpot_s is None else StreamPace(targets.tpot_s, now, now)
