"""Token clock and triage beside the scheduler: how many prompt tokens a step may compute, and whose come first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from itertools import islice

from engine.core.precedence import PrecedenceQueue, Turns, in_order, turns_by_urgency
from engine.core.sequence import Sequence, SequenceStatus
from engine.core.step_stats import NO_DRAFTS, DraftOutcome, StepMeter
from engine.pacing.lending import StepLending, spare_until_s
from engine.pacing.queue_scan import QueueScan
from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import MAX_GAP_S, MIN_CHUNK_TOKENS, UNMEASURED_TOKENS, StreamPace, TokenClock
from engine.pacing.triage import Job, OldestTurn, triage

_TTFT_SHARE = 0.2
"""A chunk takes at most this share of the least target that can be kept, so that a more urgent prompt may come in."""
_LEAST_CHUNK_S = 0.02
"""A tighter target makes chunks no shorter than this: each step has a price of its own."""
_KEPT = 2.0
"""Prompts that have this multiple of the least target to spare let those behind go first."""
_ANSWER_TOKENS = 0
"""Answers with fewer tokens after the first may miss their target."""

TRIAGED = 128
"""Waiting prompts that triage looks at in a step, at most. In a class a part of them is for late ones."""
_LATE_TRIAGED = 16
_PART = 512
"""Prompts of the queue that are looked at in one step: more would hold it up."""
_SCAN_S = 0.02
_SCAN_EACH_S = 30e-6
"""The queue is looked through anew after `_SCAN_S`, and after this for each prompt in it: it takes about a tenth of
that. A part of it waits as long for each of its own."""


class TriageWindow:
    """Which waiting prompts triage looks at: all, or `TRIAGED` of them where there are more.

    Those are the first in the order of places that may still be in time; of the others, which keep no place among them,
    the smallest and the oldest; and the most urgent one of each of their tenants, which is served in their turns. Other
    prompts come in when these leave. In a class without due times they are the first in order of precedence. To look
    through the queue takes time in proportion to its length, and so is done in intervals, and in parts.
    """

    def __init__(self, expect: Callable[[Sequence], None] = lambda sequence: None) -> None:
        """`expect` is `KVCacheManager.expect`."""
        self._expect = expect
        self._chosen: dict[Sequence, None] = {}
        self._scan: QueueScan[Sequence] | None = None
        """The look through the queue that is under way."""
        self._begun_s = self._part_s = -math.inf

    def added(self, sequence: Sequence) -> None:
        """A sequence waits."""
        if self._scan is not None:
            self._scan.add(sequence.precedence.class_rank, sequence)
        if self._begun_s > -math.inf and len(self._chosen) < 2 * TRIAGED:
            self._chosen[sequence] = None

    def of(self, waiting: PrecedenceQueue[Sequence], fit: PromptFit, now: float) -> list[Sequence]:
        """The prompts that triage is to look at, in order of precedence."""
        if len(waiting) <= TRIAGED:
            self._chosen.clear()
            self._scan, self._begun_s = None, -math.inf
            return list(waiting.in_order())
        self._chosen = {each: None for each in self._chosen if each in waiting}
        few = len(self._chosen) < TRIAGED // 2
        old = now - self._begun_s >= max(_SCAN_S, _SCAN_EACH_S * len(waiting))
        if self._scan is None and (few or old):
            self._scan, self._begun_s = QueueScan(waiting.by_class(), 2 * TRIAGED), now
            self._part_s = -math.inf
        if self._scan is not None and (few or now - self._part_s >= _SCAN_EACH_S * _PART):
            self._part_s = now
            is_over = self._scan.go_on(_PART, fit.token_s, now, self._expect)
            if is_over or few:
                found = dict.fromkeys(self._choose(self._scan, waiting, fit, now))
                self._chosen = found if is_over else {**found, **self._chosen}
            if is_over:
                self._scan = None
        return in_order(self._chosen)

    def _choose(
        self, scan: QueueScan[Sequence], waiting: PrecedenceQueue[Sequence], fit: PromptFit, now: float
    ) -> list[Sequence]:
        chosen: list[Sequence] = []
        for rank, seen in scan.seen.items():
            left = TRIAGED - len(chosen)
            if left <= 0:
                break
            if seen.count <= left or not seen.has_due_time:
                chosen += islice(waiting.in_order(rank), left)
                continue
            here = seen.narrowed(lambda each: each in waiting, fit.token_s, now)
            chosen += here.first(left, at_least_aside=_LATE_TRIAGED)
        return [*chosen, *_more_urgent(chosen, waiting)]


def _more_urgent(chosen: Iterable[Sequence], waiting: PrecedenceQueue[Sequence]) -> Iterator[Sequence]:
    """The most urgent ones of the tenants of these, where they are more urgent than any of these."""
    most: dict[tuple[int, int], int] = {}
    for each in chosen:
        group, urgency = each.precedence.group, each.precedence.within_tenant
        most[group] = max(most.get(group, urgency), urgency)
    for group, urgency in most.items():
        first = waiting.most_urgent(group)
        if first.precedence.within_tenant > urgency:
            yield first


class PromptPacing:
    """Paces prompts by the targets of the streams beside them, and orders them by those of their first tokens. Without
    targets, or before decode steps are measured, nothing is paced; without targets or measured prompts the order is
    that of `engine.core.precedence`."""

    def __init__(
        self, meter: StepMeter, expect: Callable[[Sequence], None], *, mixes: Callable[[], bool]
    ) -> None:
        """`expect` is `KVCacheManager.expect`, `mixes` is `ModelRunner.mixes_steps`."""
        self._mixes, self._expect = mixes, expect
        self.active = False
        """Whether there was a request with targets; until then there is nothing to do."""
        self.clock = TokenClock(_ANSWER_TOKENS)
        self.window = TriageWindow(expect)
        self.late: frozenset[Sequence] = frozenset()
        """Prompts that the latest triage found late."""
        self.lending = StepLending(lambda: None, lambda now: now)
        """Rests for a neighbour's sake; none before `lend`."""
        self._rests = False
        self.reservation_waits = False
        """Whether any reservation found too few blocks or no slot: what ends streams sooner helps it."""
        self._turn: OldestTurn[Sequence] = OldestTurn()
        self._urgent_s = math.inf
        """The least TTFT target that its prompt could keep, were it alone."""
        self.meter = meter
        self._step_s = 0.0
        self._chunk_before = False
        """Whether prompt tokens were computed since the latest step that decoded, or it waited for a neighbour's."""

    @property
    def separate(self) -> bool:
        """Whether prompts get steps of their own, because a mixed one takes longer than both parts."""
        return not self._mixes()

    def grant(self, now: float, decodes: Collection[Sequence], first: Sequence | None) -> int | None:
        """Prompt tokens of the next step, where `first` is the first prompt; 0: the step only decodes.

        None where nothing is paced: no prompt, no stream with a target, or no measured step times of decodes.
        """
        if first is None:
            self.clock.nothing_waits()
            return None
        prompt_fit = self._prompt_fit()
        streams = [sequence.pace for sequence in decodes if sequence.pace is not None]
        steps = self.meter.decode_steps(decodes, joining=1)  # the prompt that is computed joins them
        if not streams or steps is None:
            return None
        if prompt_fit is None:
            return UNMEASURED_TOKENS
        self._step_s, crowd = steps
        mixed = not self.separate
        fit = (self.meter.prompt_fit.beside if mixed else None) or prompt_fit
        fit = fit.faster(self.meter.prompt_speed)
        return self.clock.grant(
            now,
            streams,
            self._step_s,
            fit,
            remaining=first.uncached_tokens,
            context_tokens=first.prefix_tokens,
            mixed=mixed,
            crowd=crowd,
        )

    def lend(self, demand: Callable[[], int | None], running: Collection[Sequence], waiting: Sized) -> None:
        """Lets streams wait for a neighbour's sake from now on. `demand` is `ModelRunner.demand`; `running` and
        `waiting` are, at any time, all sequences."""
        self.lending = StepLending(demand, lambda now: self._spare_until_s(now, running, waiting))

    def rests(self, now: float) -> bool:
        """Whether the next step waits for a neighbour's sake."""
        self._rests = self._rests and self.lending.rests(now)
        return self._rests

    @property
    def next_look_s(self) -> float:
        """When to ask `rests` again; infinity without a rest."""
        return self.lending.next_look_s if self._rests else math.inf

    def _spare_until_s(self, now: float, running: Collection[Sequence], waiting: Sized) -> float:
        """Until when the next step may wait; `now` where it may not, because a prompt or a reservation waits, a stream
        has no target, or no steps were measured. Costs O(running)."""
        streams = [each.pace for each in running if each.pace is not None and each.remaining == 1]
        fit = self.meter.fit.latest
        if fit is None or self.reservation_waits or len(waiting) or len(streams) < len(running):
            return now
        self._step_s = fit.step_s(len(running), sum(each.num_computed for each in running))
        return spare_until_s(now, streams, self.clock, self._step_s)

    def order(
        self,
        now: float,
        decodes: Collection[Sequence],
        running: Iterable[Sequence],
        waiting: PrecedenceQueue[Sequence],
    ) -> Turns[Sequence] | None:
        """The turns of prompts: by class, then those that were interrupted after a token, then by triage. `running`
        prompts come in order of precedence.

        Triage takes each prompt with its own due time. In the turn of a tenant's prompt its most urgent one is served,
        and both trade places and due times then, so that other tenants see no difference. None where no first token
        has a target, or before prompts are measured.
        """
        classes: defaultdict[int, list[Sequence]] = defaultdict(list)
        fit = self._prompt_fit()
        if fit is not None:
            queued = self.window.of(waiting, fit, now)
            for sequence in queued:  # those before them may have left them less to compute
                self._expect(sequence)
            for sequence in (*running, *queued):
                classes[sequence.precedence.class_rank].append(sequence)
        self.late = frozenset()
        if fit is None or not any(_has_due_time(members) for members in classes.values()):
            self._turn.of(None)
            return None
        # What a second's worth of prompts takes beside the streams, on lent cores too.
        lent = self.meter.lent.value
        second_s = 1 / (self._share(decodes) * lent)
        chunk_s = self._chunk_s
        turns: list[tuple[Sequence, Sequence]] = []
        ahead_s, oldest, self._urgent_s = 0.0, None, math.inf
        for _, members in sorted(classes.items(), reverse=True):
            works_s = {each: second_s * _work_s(fit, each, chunk_s) for each in members}
            # A client reads those; they were interrupted here.
            interrupted = [each for each in members if each.has_own_output]
            prompts = [each for each in members if not each.has_own_output]
            ahead_s += sum(works_s[each] for each in interrupted)
            turns += ((each, each) for each in interrupted)
            if not _has_due_time(prompts):
                turns += ((each, each) for each in prompts)
            else:
                jobs = [Job(each, works_s[each], each.first_due_s - now, each.arrival) for each in prompts]
                able = [each for each in prompts if each.due_after_s >= _alone_s(fit, each) / lent]
                least_s = min((each.due_after_s for each in able), default=math.inf)
                found = triage(jobs, ahead_s, _KEPT * least_s)
                self.late |= found.late
                self._urgent_s = min(self._urgent_s, least_s)
                served = turns_by_urgency(found.order)
                if oldest is None and found.oldest_behind is not None:
                    oldest = found.oldest_behind
                    if self._turn.of(oldest, min(oldest.uncached_tokens, self.chunk_tokens(oldest))):
                        served = _first_itself(served, oldest)
                turns += served
            ahead_s += sum(works_s[each] for each in prompts)
        if oldest is None:
            self._turn.of(None)
        return Turns(turns)

    def chunk_tokens(self, first: Sequence) -> int:
        """Prompt tokens that a step may compute, beginning with those of `first`, so that a more urgent prompt may come
        in soon. Targets that nobody can keep have no say in it. Valid after `order` returned turns."""
        fit = self._prompt_fit()
        assert fit is not None
        return max(MIN_CHUNK_TOKENS, fit.tokens_within(self._chunk_s, first.prefix_tokens))

    @property
    def _chunk_s(self) -> float:
        return min(max(_TTFT_SHARE * self._urgent_s, _LEAST_CHUNK_S), MAX_GAP_S)

    def admitted(self, sequence: Sequence, now: float) -> None:
        """A stream goes on here whose first token another worker computed."""
        sequence.pace = _pace(sequence, now)

    def stepped(
        self, now: float, num_new: Mapping[Sequence, int], drafts: Mapping[Sequence, DraftOutcome] = NO_DRAFTS
    ) -> None:
        """A step ended that computed `num_new` tokens of each sequence; accepted drafts are tokens, too."""
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
                late += self.clock.is_late(pace, now)
            pace.emitted(now, 1 + drafts[sequence].accepted if sequence in drafts else 1)
        self.clock.margin.record(now, timed, late)
        if any(tokens == 1 for tokens in num_new.values()):
            self._chunk_before = False
        self._rests = self.lending.begin(now)
        self._chunk_before |= self._rests

    def _share(self, decodes: Collection[Sequence]) -> float:
        """The share of the time that streams with targets leave to prompts."""
        tpots_s = [sequence.pace.tpot_s for sequence in decodes if sequence.pace is not None]
        if not tpots_s or (steps := self.meter.decode_steps(decodes)) is None:
            return 1.0
        return self.clock.share_of_prompts(steps[0], tpots_s, steps[1])

    def _prompt_fit(self) -> PromptFit | None:
        """The fit, or what the mean rate says, which counts decodes beside prompts as their time: it errs upwards."""
        rate = self.meter.rates.prefill_tokens_per_s
        return self.meter.prompt_fit.latest or (PromptFit(0.0, 1 / rate, 0.0) if rate else None)


def _pace(sequence: Sequence, now: float) -> StreamPace | None:
    """The pace of a stream whose first token came now; None without a target."""
    targets = sequence.request.targets
    return None if targets is None or targets.tpot_s is None else StreamPace(targets.tpot_s, now, now)


def _has_due_time(members: Iterable[Sequence]) -> bool:
    return any(sequence.first_due_s < math.inf for sequence in members)


def _work_s(fit: PromptFit, sequence: Sequence, chunk_s: float) -> float:
    """Seconds that a prompt still takes alone, in chunks of so many seconds, with the cached prefix that it had or is
    expected to have."""
    work_s = fit.chunk_s(sequence.uncached_tokens, sequence.prefix_tokens)
    return work_s + fit.base_s * int(work_s / chunk_s)


def _alone_s(fit: PromptFit, sequence: Sequence) -> float:
    """Seconds that the whole prompt takes at least, in one chunk."""
    return fit.chunk_s(len(sequence.tokens) - sequence.expected_cached, sequence.expected_cached)


def _first_itself(
    turns: Iterable[tuple[Sequence, Sequence]], one: Sequence
) -> list[tuple[Sequence, Sequence]]:
    """The turns with that of `one` first and served by itself: its share is not another one's to take."""
    turns = list(turns)
    instead = next(served for owner, served in turns if owner is one)
    others = [(owner, instead if served is one else served) for owner, served in turns if owner is not one]
    return [(one, one), *others]
