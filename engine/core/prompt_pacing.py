"""Token clock and triage beside the scheduler: how many prompt tokens a step may compute, and whose come first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from engine.core.sequence import Sequence, SequenceStatus
from engine.core.step_stats import StepMeter
from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import MAX_GAP_S, MIN_CHUNK_TOKENS, TTFT_SHARE, StreamPace, TokenClock
from engine.pacing.triage import Job, OldestTurn, triage

_LEAST_SHARE = 0.1
"""Prompts count as slowed down by the streams beside them by ten times at most."""
_LEAST_CHUNK_S = 0.02
"""A tighter target makes chunks no shorter than this: each step has a price of its own."""


class PromptPacing:
    """Paces prompts by the targets of the streams beside them, and orders them by those of their first tokens. Without
    targets, or before steps are measured, nothing is paced, and the order is that of `engine.core.precedence`."""

    def __init__(self, meter: StepMeter, *, separate: bool) -> None:
        """`separate`: prompts get steps of their own, because a mixed step takes longer than both of its parts."""
        self.separate = separate
        self.active = False
        """Whether there was a request with targets. Until then nothing needs to be asked or told."""
        self.clock = TokenClock()
        self.late = 0
        """Prompts that the latest triage found late."""
        self._turn: OldestTurn[Sequence] = OldestTurn()
        self._urgent_s = math.inf
        """The least TTFT target of those that can be in time."""
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

    def order(
        self,
        now: float,
        decodes: Collection[Sequence],
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
    ) -> list[Sequence] | None:
        """Prompts in order of service: by class, then by triage. `running` and `waiting` come in order of precedence.

        None where no first token has a target, or before steps are measured.
        """
        classes: defaultdict[int, list[Sequence]] = defaultdict(list)
        for sequence in (*running, *waiting):
            classes[sequence.precedence.class_rank].append(sequence)
        fit = self._prompt_fit()
        self.late = 0
        if fit is None or not any(_has_due_time(members) for members in classes.values()):
            self._turn.of(None)
            return None
        second_s = 1 / self._share(decodes)  # what a second's worth of prompts takes beside the streams
        order: list[Sequence] = []
        ahead_s, oldest, self._urgent_s = 0.0, None, math.inf
        for _, members in sorted(classes.items(), reverse=True):
            works_s = {each: second_s * _work_s(fit, each) for each in members}
            served = members
            if _has_due_time(members):
                jobs = [
                    Job(each, works_s[each], due_s - now, each.arrival) for each, due_s in _traded(members)
                ]
                found = triage(jobs, ahead_s)
                self.late += len(found.late)
                self._urgent_s = min(self._urgent_s, _least_ttft_s(found.in_time))
                served = [*found.in_time, *found.late]
                if oldest is None and found.oldest_behind is not None:
                    oldest = found.oldest_behind
                    if self._turn.of(oldest, min(oldest.remaining, self.chunk_tokens(oldest))):
                        served.remove(oldest)
                        served.insert(0, oldest)
            order += served
            ahead_s += sum(works_s.values())
        if oldest is None:
            self._turn.of(None)
        return order

    def chunk_tokens(self, first: Sequence) -> int:
        """Prompt tokens that a step may compute, beginning with those of `first`, so that a more urgent prompt may come
        in soon. Prompts that are late anyway have no say in it. Valid after `order` returned one."""
        fit = self._prompt_fit()
        assert fit is not None
        seconds = max(TTFT_SHARE * self._urgent_s, _LEAST_CHUNK_S)
        return max(MIN_CHUNK_TOKENS, fit.tokens_within(min(seconds, MAX_GAP_S), first.num_computed))

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
        self._turn.computed({each: tokens for each, tokens in num_new.items() if tokens > 1})
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

    def _share(self, decodes: Collection[Sequence]) -> float:
        """The share of the time that streams with targets leave to prompts."""
        paces = [sequence.pace for sequence in decodes if sequence.pace is not None]
        fit = self._meter.fit.latest
        if not paces or fit is None:
            return 1.0
        step_s = fit.step_s(len(paces), sum(sequence.num_computed for sequence in decodes))
        period_s = self.clock.margin.value * min(pace.tpot_s for pace in paces)
        return max(_LEAST_SHARE, 1 - step_s / period_s)

    def _prompt_fit(self) -> PromptFit | None:
        """The fit, or what the mean rate says, which counts decodes beside prompts as their time: it errs upwards."""
        rate = self._meter.rates.prefill_tokens_per_s
        return self._meter.prompt_fit.latest or (PromptFit(0.0, 1 / rate, 0.0) if rate else None)


def _pace(sequence: Sequence, now: float) -> StreamPace | None:
    """The pace of a stream whose first token came now; None without a target."""
    targets = sequence.request.targets
    return None if targets is None or targets.tpot_s is None else StreamPace(targets.tpot_s, now, now)


def _has_due_time(members: Iterable[Sequence]) -> bool:
    return any(sequence.first_due_s < math.inf for sequence in members)


def _work_s(fit: PromptFit, sequence: Sequence) -> float:
    """Seconds that a prompt still takes alone, with the cached prefix that it had or is expected to have."""
    computed = sequence.num_computed or sequence.expected_cached
    return fit.chunk_s(len(sequence.tokens) - computed, computed)


def _least_ttft_s(prompts: Iterable[Sequence]) -> float:
    targets = (sequence.request.targets for sequence in prompts)
    return min((each.ttft_s for each in targets if each is not None and each.ttft_s), default=math.inf)


def _traded(members: Iterable[Sequence]) -> Iterator[tuple[Sequence, float]]:
    """Prompts with their due times. Those of one tenant trade them, as they trade places in the queue: the one with the
    highest priority has the first. Other tenants see no difference."""
    tenants: defaultdict[int, list[Sequence]] = defaultdict(list)
    for sequence in members:
        tenants[sequence.precedence.tenant_key].append(sequence)
    for own in tenants.values():
        ranked = sorted(
            own, key=lambda each: (-each.precedence.within_tenant, each.first_due_s, each.arrival)
        )
        yield from zip(ranked, sorted(each.first_due_s for each in own), strict=True)
