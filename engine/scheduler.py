"""Decides which sequences compute how many tokens in the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv_cache_manager import KVCacheManager
from engine.lazy_heap import LazyHeap
from engine.sequence import Sequence, SequenceStatus

# Misfits that are tried again each step before the search gives up, and their blocks that the cache is asked for,
# but for the last one's; bounds the work of a step.
_MAX_MISFITS_A_STEP = 8
_MAX_MISFIT_BLOCKS_A_STEP = 512
# A chunk below this is not worth its step.
_MIN_CHUNK_TOKENS = 16
# Of every eight tokens, decodes leave one to waiting prompts when they could fill the budget alone.
_DECODE_SHARE = 7 / 8


@dataclass(slots=True)
class SchedulerOutput:
    """The next step: tokens to compute for each sequence, at least one each."""

    num_new: dict[Sequence, int] = field(default_factory=dict)
    preempted: int = 0
    budget: int = 0
    """Tokens left of the step's budget."""

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Adds tokens to a sequence's share."""
        self.num_new[sequence] = self.num_new.get(sequence, 0) + tokens
        self.budget -= tokens

    def take_back(self, sequence: Sequence) -> None:
        """Leaves a sequence out of the step."""
        self.budget += self.num_new.pop(sequence, 0)


class Scheduler:
    """One queue and one running set; no prefill or decode phases.

    In each step every running sequence lets `num_computed` catch up with its tokens, within
    `max_step_tokens`: decodes first, then prompts in chunks, then new ones from the queue by priority and
    arrival. A prompt that must be cut takes at most half of what is left, so that short ones behind it
    get through in the same step; what nobody takes goes to the first in line.

    Blocks for the whole prompt are taken when it starts. When a decode finds no block, the running
    sequence of lowest priority and latest arrival is preempted: it gives its blocks back, keeps its
    output and is recomputed later. `prefill_only` sequences are never preempted, as peers' writes may be
    reading their blocks.

    A queued sequence that does not fit may be overtaken `max_bypasses` times; then it blocks the queue.
    The work of a step depends on the step's sequences, not on the length of the queue.
    """

    def __init__(
        self, kv: KVCacheManager, *, max_step_tokens: int, max_running: int, max_bypasses: int
    ) -> None:
        self.running: dict[Sequence, None] = {}
        self.waiting: LazyHeap[tuple[int, int], Sequence] = LazyHeap()
        self.waiting_tokens = 0
        self.num_reserved = 0
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_bypasses = max_bypasses

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a sequence to the queue."""
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence.queue_key, sequence)
        self.waiting_tokens += sequence.remaining

    def run(self, sequence: Sequence) -> None:
        """Adds a sequence whose KV is there to the running set."""
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting or running sequence out; its blocks are the caller's concern."""
        if sequence in self.waiting:
            self.waiting_tokens -= sequence.remaining
            self.waiting.discard(sequence)
        self.running.pop(sequence, None)

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run, reserved ones counted."""
        return len(self.running) + self.num_reserved < self._max_running

    @property
    def spare_blocks(self) -> int:
        """Blocks that newcomers must leave free, so that running and reserved sequences can grow."""
        growing = len(self.running) + self.num_reserved
        return max(growing, self._kv.pool.total // 100) if growing else 0

    def may_overtake(self, priority: int) -> bool:
        """Whether a newcomer from outside the queue may take blocks now; see `max_bypasses`."""
        head = self._blocked_head(priority)
        return head is None or head.bypasses < self._max_bypasses

    def overtaken(self, priority: int) -> None:
        """Counts that a newcomer from outside the queue took blocks."""
        head = self._blocked_head(priority)
        if head is not None:
            head.bypasses += 1

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step and gives its sequences their blocks."""
        step = SchedulerOutput(budget=self._max_step_tokens)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            (decodes if sequence.remaining == 1 else prefills).append(sequence)
        prefills.sort(key=lambda sequence: sequence.queue_key)
        self._schedule_decodes(step, decodes, others=bool(prefills or len(self.waiting)))
        for sequence in prefills:
            if step.budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING:
                step.give(sequence, _chunk(sequence.remaining, step.budget))
        if step.preempted == 0:
            self._admit(step)
        cut = [sequence for sequence, tokens in step.num_new.items() if tokens < sequence.remaining]
        for sequence in cut:
            if step.budget == 0:
                break
            step.give(sequence, min(sequence.remaining - step.num_new[sequence], step.budget))
        return step

    def _schedule_decodes(self, step: SchedulerOutput, decodes: list[Sequence], *, others: bool) -> None:
        limit = max(1, int(step.budget * _DECODE_SHARE)) if others else step.budget
        rotate = len(decodes) > limit
        for sequence in decodes[:limit]:
            if sequence.status is not SequenceStatus.RUNNING or not self._grow(step, sequence):
                continue
            step.give(sequence, 1)
            if rotate:  # Those left out now come first in the next step.
                self.running[sequence] = self.running.pop(sequence)

    def _grow(self, step: SchedulerOutput, sequence: Sequence) -> bool:
        """Makes room for a decode, preempting as needed; False when it was preempted itself."""
        while not self._kv.grow(sequence):
            candidates = [other for other in self.running if not other.request.prefill_only]
            victim = max(candidates, key=lambda other: other.queue_key)
            step.take_back(victim)
            step.preempted += 1
            self._kv.free(victim)
            del self.running[victim]
            self.enqueue(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, step: SchedulerOutput) -> None:
        skipped: list[Sequence] = []
        asked = 0
        while step.budget > 0 and self.has_slot and len(skipped) < _MAX_MISFITS_A_STEP:
            sequence = self.waiting.pop()
            if sequence is None:
                break
            before = sequence.remaining
            if self._kv.start(sequence, spare=self.spare_blocks) is None:
                sequence.misfit = True
                skipped.append(sequence)
                asked += len(sequence.block_hashes)
            else:
                self.waiting_tokens -= before
                sequence.misfit, sequence.bypasses = False, 0
                for overtaken in skipped:
                    overtaken.bypasses += 1
                self.run(sequence)
                step.give(sequence, _chunk(sequence.remaining, step.budget))
            blocked = any(misfit.bypasses >= self._max_bypasses for misfit in skipped)
            if blocked or asked >= _MAX_MISFIT_BLOCKS_A_STEP:
                break
        for sequence in skipped:
            self.waiting.push(sequence.queue_key, sequence)

    def _blocked_head(self, priority: int) -> Sequence | None:
        first = self.waiting.peek()
        if first is None or not first[1].misfit or first[1].request.priority < priority:
            return None
        return first[1]


def _chunk(remaining: int, budget: int) -> int:
    return remaining if remaining <= budget else min(budget, max(budget // 2, _MIN_CHUNK_TOKENS))
