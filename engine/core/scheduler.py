"""Chooses which sequences compute how many tokens in the next step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.precedence import Precedence, PrecedenceQueue, Turns, in_order, whom_to_preempt
from engine.core.prompt_pacing import PromptPacing
from engine.core.sequence import READS_A_PREEMPTION, Sequence, SequenceStatus
from engine.pacing.token_clock import MIN_CHUNK_TOKENS
from splitserve.errors import SplitserveError
from splitserve.generation.kv_blocks import watermark_blocks
from splitserve.queues import Offer, offer_in_order
from splitserve.request_guard import request_error

# Bounds on the work of a step: waiting sequences that did not fit before, and blocks looked up for all but the last.
_MAX_MISFITS_A_STEP = 8
_MAX_MISFIT_BLOCKS_A_STEP = 512
_MIN_CHUNK_TOKENS = 16  # no prompt is cut into smaller chunks
_DECODE_SHARE = 7 / 8  # of the step's budget, while prompts wait


@dataclass(slots=True)
class SchedulerOutput:
    """The next step: tokens to compute for each sequence in it, at least one."""

    num_new: dict[Sequence, int] = field(default_factory=dict)
    now: float = 0.0
    """When it was chosen."""
    preempted: int = 0
    budget: int = 0
    """Tokens left of the step's budget."""
    whole: bool = False
    """Whether the first prompts take all prompt tokens, rather than half of what is left of the budget each."""
    failed: list[tuple[Sequence, SplitserveError]] = field(default_factory=list)
    """Sequences that cannot be scheduled, and why. They are in no queue any more, but not ended."""

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Schedules `tokens` more tokens of a sequence."""
        self.num_new[sequence] = self.num_new.get(sequence, 0) + tokens
        self.budget -= tokens

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Takes a sequence out of the step, as its handling raised `error`; see `request_error`."""
        self.failed.append((sequence, request_error(error, sequence.request_id, sequence.request.trace)))
        self.take_back(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Takes a sequence out of the step."""
        self.budget += self.num_new.pop(sequence, 0)


class Scheduler:
    """Continuous batching with chunked prefill, as in vLLM: one queue and one running set, no prefill or decode phases.

    In each step the running sequences' `num_computed` catches up with their tokens, within a budget of
    `max_step_tokens`: decodes first, then running prompts in chunks, then waiting ones in order of precedence. A
    prompt that must be cut takes at most half of what is left, so that short ones after it fit into the same step; what
    is left over goes to the first of those that were cut. Beside streams with targets the token clock says how many
    prompt tokens the step may compute, and the first prompts take them all. Where first tokens have targets, prompts
    are served in the order of triage, as many in a step as gain by it.

    A sequence gets blocks for its whole prompt when it starts. When a decode finds no free block, the running sequence
    that is last in that order is preempted: it gives up its blocks, keeps its output, and is read back or computed
    again later. `prefill_only` sequences are never preempted: writes to peers may be reading their blocks.

    A waiting sequence that does not fit may be bypassed `max_bypasses` times; then it blocks the queue. The cost of a
    step depends on its sequences, not on the length of the queue.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_step_tokens: int,
        max_running: int,
        max_bypasses: int,
        pacing: PromptPacing | None = None,
    ) -> None:
        self.running: dict[Sequence, None] = {}
        self.waiting: PrecedenceQueue[Sequence] = PrecedenceQueue()
        self.waiting_tokens = 0
        self.num_reserved = 0
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_bypasses = max_bypasses
        self._pacing = pacing
        self._head: Sequence | None = None
        """The waiting sequence whose turn was first when triage last decided; None where it did not."""

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a sequence to the queue."""
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)
        self.waiting_tokens += sequence.remaining
        if self._pacing is not None and self._pacing.active:
            self._kv.expect(sequence)
            self._pacing.window.added(sequence)

    def enqueue_waiting(self, sequence: Sequence) -> None:
        """The same once its KV has been read from lower tiers, unless it has ended meanwhile."""
        if sequence.status is SequenceStatus.WAITING:
            self.enqueue(sequence)

    def run(self, sequence: Sequence) -> None:
        """Adds a sequence that has its blocks to the running set."""
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence. The caller frees its blocks."""
        self._kv.read_ended(sequence)
        if sequence in self.waiting:
            self.waiting_tokens -= sequence.remaining
            self.waiting.discard(sequence)
        self.running.pop(sequence, None)

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run; reserved ones count as running."""
        return len(self.running) + self.num_reserved < self._max_running

    @property
    def may_reserve_slot(self) -> bool:
        """Whether one more reserved sequence leaves a slot that none of them has."""
        return self.num_reserved + 1 < self._max_running

    @property
    def watermark_blocks(self) -> int:
        """See `splitserve.generation.kv_blocks.watermark_blocks`; running and reserved sequences grow."""
        return watermark_blocks(len(self.running) + self.num_reserved, self._kv.pool.total)

    def may_bypass(self, precedence: Precedence) -> bool:
        """Whether a reservation, which does not queue here, may take blocks before the waiting sequences."""
        head = self._blocked_head(precedence)
        return head is None or head.bypassed < self._max_bypasses

    def count_bypass(self, precedence: Precedence) -> None:
        """Counts a bypass of the first waiting sequence, after a reservation took blocks."""
        if (head := self._blocked_head(precedence)) is not None:
            head.bypassed += 1

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Chooses the next step and allocates blocks for it. `now` is on the clock of the requests' targets."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (decodes if sequence.remaining == 1 else prefills).append(sequence)
        prefills = in_order(prefills)
        order = granted = None
        if self._pacing is not None and self._pacing.active:
            order = self._pacing.order(now, decodes, prefills, self.waiting)
            ordered = order.order if order else prefills
            self._head = next((each for each in ordered if each.status is SequenceStatus.WAITING), None)
            granted = self._pacing.grant(now, decodes, self._first(ordered))
        if granted is not None:
            step = SchedulerOutput(now=now, whole=True)
            self._pace(step, decodes, order, prefills, granted)
            return step
        step = SchedulerOutput(now=now, budget=self._max_step_tokens)
        self._schedule_decodes(step, decodes, others=bool(prefills or len(self.waiting)))
        self._schedule_prompts(step, order, prefills)
        # What is left of the budget goes to prompts that were cut, in order.
        cut = [] if step.whole else [each for each, tokens in step.num_new.items() if tokens < each.remaining]
        for sequence in cut:
            step.give(sequence, min(sequence.remaining - step.num_new[sequence], step.budget))
        return step

    def _first(self, prompts: list[Sequence]) -> Sequence | None:
        """The prompt that is computed next: the first of these, unless it waits for a slot, or else of the queue."""
        for sequence in prompts:
            if sequence.status is SequenceStatus.RUNNING or self.has_slot:
                return sequence
        return self.waiting.peek() if self.has_slot else None

    def _pace(
        self,
        step: SchedulerOutput,
        decodes: list[Sequence],
        order: Turns[Sequence] | None,
        prefills: list[Sequence],
        granted: int,
    ) -> None:
        """Fills a step in which at most `granted` prompt tokens are computed."""
        assert self._pacing is not None
        if granted and self._pacing.separate:
            step.budget = min(granted, self._max_step_tokens)
            self._schedule_prompts(step, order, prefills)
            if step.num_new:
                return
            granted = 0  # none of them fits
        step.budget = self._max_step_tokens
        self._schedule_decodes(step, decodes, others=granted > 0)
        if granted:
            step.budget = min(granted, step.budget)
            self._schedule_prompts(step, order, prefills)

    def _schedule_prompts(
        self, step: SchedulerOutput, order: Turns[Sequence] | None, prefills: list[Sequence]
    ) -> None:
        """Gives the budget to prompts in the order of triage, or else to running ones, then to waiting ones."""
        if order is None:
            for sequence in prefills:
                if step.budget == 0:
                    break
                if sequence.status is SequenceStatus.RUNNING:
                    _give_chunk(step, sequence)
            self._admit(step, iter(self.waiting.pop, None))
            return
        assert self._pacing is not None
        step.whole, streams, behind = True, len(step.num_new), len(order.order)
        step.budget = min(step.budget, self._pacing.chunk_tokens(order.order[0]))
        self._admit(step, self._by_triage(step, order, streams))
        for place, sequence in enumerate(order.order if step.budget else ()):
            if sequence.status is SequenceStatus.RUNNING and sequence not in step.num_new:
                if step.budget == 0 or not (streams or self._joins(step, sequence, behind - place)):
                    break
                self._take_turn(sequence, order)
                _give_chunk(step, sequence)

    def _schedule_decodes(self, step: SchedulerOutput, decodes: list[Sequence], *, others: bool) -> None:
        limit = max(1, int(step.budget * _DECODE_SHARE)) if others else step.budget
        rotate = len(decodes) > limit
        for sequence in decodes[:limit]:
            if sequence.status is not SequenceStatus.RUNNING or not self._grow(step, sequence):
                continue
            step.give(sequence, 1)
            if rotate:  # move it to the end: those left out now come first in the next step
                self.running[sequence] = self.running.pop(sequence)

    def _grow(self, step: SchedulerOutput, sequence: Sequence) -> bool:
        """Allocates a block for a decode if it needs one, preempting as needed; False if it was preempted itself."""
        while not self._kv.grow_before_reads(sequence):
            victim = self._victim()
            step.take_back(victim)
            step.preempted += 1
            self._kv.free(victim)
            del self.running[victim]
            victim.reads_left, victim.pace = READS_A_PREEMPTION, None  # its times begin anew
            victim.misfit, self._head = True, None  # reservations that come before it are counted
            self.enqueue(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        late = self._pacing.late if self._pacing is not None else frozenset()
        return whom_to_preempt((one for one in self.running if not one.request.prefill_only), late)

    def _admit(self, step: SchedulerOutput, queued: Iterator[Sequence]) -> None:
        """Starts waiting sequences, as `queued` takes them off the queue, while there are budget, slots and blocks."""
        if not self.has_slot and (first := self._first_waiting()) is not None:
            first.misfit = True  # reservations that take slots before it are counted
        # After a preemption blocks are short: admit nobody in this step.
        if step.preempted or not len(self.waiting) or not self.has_slot:
            return
        misfits: list[Sequence] = []
        for sequence in offer_in_order(
            self._candidates(step, queued),
            lambda sequence: self._start(sequence, step, misfits),
            max_bypasses=self._max_bypasses,
            max_looks=_MAX_MISFITS_A_STEP,
        ):
            self.run(sequence)
            _give_chunk(step, sequence)
        for sequence in misfits:
            self.waiting.push(sequence)

    def _candidates(self, step: SchedulerOutput, queued: Iterator[Sequence]) -> Iterator[Sequence]:
        """Takes sequences off the queue for as long as one more may be tried in this step."""
        blocks_looked_up = 0
        while step.budget > 0 and self.has_slot and blocks_looked_up < _MAX_MISFIT_BLOCKS_A_STEP:
            if (sequence := next(queued, None)) is None:
                return
            yield sequence
            if sequence.misfit:
                blocks_looked_up += len(sequence.block_hashes)

    def _by_triage(self, step: SchedulerOutput, order: Turns[Sequence], streams: int) -> Iterator[Sequence]:
        """Takes sequences off the queue in this order; running prompts between them get their chunks."""
        for place, sequence in enumerate(order.order):
            if step.budget == 0 or not (streams or self._joins(step, sequence, len(order.order) - place)):
                step.budget = 0
                return
            self._take_turn(sequence, order)
            if sequence.status is SequenceStatus.RUNNING:
                _give_chunk(step, sequence)
            else:
                self.waiting.discard(sequence)
                yield sequence

    def _joins(self, step: SchedulerOutput, prompt: Sequence, behind: int) -> bool:
        """Whether one more prompt shares a step without streams; see `PromptFit.joins`."""
        if not step.num_new or (pacing := self._pacing) is None:
            return True
        fit = pacing.meter.prompt_fit.latest
        tokens, there = min(prompt.uncached_tokens, step.budget), len(step.num_new)
        return not pacing.separate and (fit is None or fit.joins(tokens, there, behind))

    def _take_turn(self, sequence: Sequence, order: Turns[Sequence]) -> None:
        """Gives a sequence that is served now the place and the due time of its turn."""
        holder = order.take(sequence)
        if holder is not sequence:
            self.waiting.trade(sequence, holder)
            sequence.first_due_s, holder.first_due_s = holder.first_due_s, sequence.first_due_s

    def _start(self, sequence: Sequence, step: SchedulerOutput, misfits: list[Sequence]) -> Offer:
        """Allocates blocks for a waiting sequence, or has its KV read first; appends it to `misfits` if it is one."""
        before, watermark = sequence.remaining, self.watermark_blocks
        try:
            if self._kv.reads_again(sequence, watermark, self.enqueue_waiting):
                self.waiting_tokens -= before
                return Offer.SKIP
            sequence.misfit = self._kv.start(sequence, watermark=watermark) is None
        except BaseException as error:
            step.fail(sequence, error)
            self.waiting_tokens -= before
            return Offer.SKIP
        if sequence.misfit:
            misfits.append(sequence)
            return Offer.MISFIT
        self.waiting_tokens -= before
        sequence.bypassed = 0
        return Offer.TAKEN

    def _first_waiting(self) -> Sequence | None:
        return self._head if self._head is not None and self._head in self.waiting else self.waiting.peek()

    def _blocked_head(self, precedence: Precedence) -> Sequence | None:
        """The first waiting sequence, if it does not fit and a request with this precedence comes after it."""
        first = self._first_waiting()
        if first is None or not first.misfit or precedence.precedes(first.precedence):
            return None
        return first


def _give_chunk(step: SchedulerOutput, sequence: Sequence) -> None:
    """Schedules the next chunk of a prompt, of at least one token."""
    left, budget = sequence.remaining, step.budget
    step.give(sequence, min(left, budget) if step.whole else _chunk(left, budget))
    if step.whole and step.budget < MIN_CHUNK_TOKENS:
        step.budget = 0  # too little for one more prompt


def _chunk(remaining: int, budget: int) -> int:
    """Tokens of a prompt in this step: all that remain, or about half of the budget."""
    return remaining if remaining <= budget else min(budget, max(budget // 2, _MIN_CHUNK_TOKENS))
