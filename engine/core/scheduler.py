"""Chooses which sequences compute how many tokens in the next step, and allocates their KV blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.core.sequence import Sequence, SequenceStatus
from engine.kv_cache.block_pool import BlockPool
from engine.scheduling.waiting_queue import Precedence, WaitingQueue, in_order, take_last
from splitserve.errors import SplitserveError
from splitserve.generation.kv_blocks import blocks_for, extend_block_hashes, watermark_blocks
from splitserve.latency_model import LatencyModel
from splitserve.queues import Offer, offer_in_order
from splitserve.rpc.status import request_error

_table_ids = count(1)
"""Unique in the process, as a runner may serve several engines, one after the other."""


class KVCacheManager:
    """Block tables over a `BlockPool`. `block_size` is in tokens."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_cache: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_cache = prefix_cache

    def computed_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Cached blocks with the KV of the sequence's first tokens, of `max_tokens` at most.

        Full blocks only. Takes no ownership. Costs O(hits): blocks are hashed only up to the first miss.
        """
        hits: list[int] = []
        if not self._prefix_cache:
            return hits
        hashes = sequence.block_hashes
        for index in range(max_tokens // self.block_size):
            if index == len(hashes):
                self._extend_hashes(sequence, index + 1)
            block = self.pool.lookup(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def start(self, sequence: Sequence, *, watermark: int, writer: bool = False) -> list[int] | None:
        """Allocates blocks for all of a sequence's tokens, sharing cached ones; returns the new ones.

        None, and nothing changed, if fewer than `watermark` blocks would stay free. A sequence that is computed here
        has at least the tokens computed whose logits are needed. One whose KV a `writer` brings may be cached
        completely; its new blocks are owned by the writer, too.
        """
        total = len(sequence.tokens)
        hits = self.computed_prefix(sequence, total if writer else sequence.reusable_tokens)
        fresh_count = blocks_for(total, self.block_size) - len(hits)
        if fresh_count + self.pool.unowned(hits) + watermark > self.pool.free:
            return None
        if writer and self._prefix_cache:  # now, while the peer computes, rather than when its KV arrives
            self._extend_hashes(sequence, total // self.block_size)
        self.pool.share(hits)
        fresh = self.pool.allocate(fresh_count, after=hits[-1] if hits else None, writer=writer)
        sequence.block_ids = hits + fresh
        sequence.table_id = next(_table_ids)
        sequence.cached_blocks = len(hits)
        sequence.num_computed = sequence.cached_tokens = len(hits) * self.block_size
        return fresh

    def grow(self, sequence: Sequence) -> bool:
        """Extends the block table to all tokens; False, and nothing changed, if too few blocks are free."""
        missing = blocks_for(len(sequence.tokens), self.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.free:
            return False
        after = sequence.block_ids[-1] if sequence.block_ids else None
        sequence.block_ids.extend(self.pool.allocate(missing, after=after))
        return True

    def cache_computed(self, sequence: Sequence) -> None:
        """Adds every block that is full of computed tokens to the prefix cache."""
        full = sequence.num_computed // self.block_size
        if not self._prefix_cache or full <= sequence.cached_blocks:
            return
        self._extend_hashes(sequence, full)
        for index in range(sequence.cached_blocks, full):
            self.pool.cache(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.cached_blocks = full

    def free(self, sequence: Sequence) -> None:
        """Releases all of a sequence's blocks."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.table_id = 0
        sequence.num_computed = sequence.cached_blocks = 0

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        salt = sequence.request.cache_salt
        extend_block_hashes(sequence.block_hashes, sequence.tokens, self.block_size, salt, num_blocks)


# Bounds on the work of a step: waiting sequences that did not fit before, and blocks looked up for all but the last.
_MAX_MISFITS_A_STEP = 8
_MAX_MISFIT_BLOCKS_A_STEP = 512
_DECODE_SHARE = 7 / 8  # of the step's budget, while prompts wait


@dataclass(slots=True)
class SchedulerOutput:
    """The next step: tokens to compute for each sequence in it, at least one."""

    num_new: dict[Sequence, int] = field(default_factory=dict)
    preempted: int = 0
    budget: int = 0
    """Tokens left of the step's budget."""
    failed: list[tuple[Sequence, SplitserveError]] = field(default_factory=list)
    """Sequences that cannot be scheduled, and why. They are in no queue any more, but not ended."""

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Schedules `tokens` more tokens of a sequence."""
        self.num_new[sequence] = self.num_new.get(sequence, 0) + tokens
        self.budget -= tokens

    def give_chunk(self, sequence: Sequence) -> None:
        """Schedules the next chunk of a prompt: all that remains, or about half of the budget."""
        left, budget = sequence.remaining, self.budget
        self.give(sequence, left if left <= budget else min(budget, max(budget // 2, MIN_PROMPT_TOKENS)))

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
    `max_step_tokens`: decodes first, then running prompts in chunks, then waiting ones in the order of
    `engine.scheduling.waiting_queue`. Beside streams, prompts get the part of the budget that `prompt_budget` returns.
    A prompt that must be cut takes at most half of the budget left, so that short prompts after it fit into the same
    step. The budget left over at the end goes to the first prompts that were cut.

    A sequence gets blocks for its whole prompt when it starts. When a decode finds no free block, the running sequence
    that is last in that order is preempted: it gives up its blocks, keeps its output, and is computed again
    later. `prefill_only` sequences are never preempted: writes to peers may be reading their blocks.

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
        latency: Callable[[], LatencyModel] = LatencyModel,
    ) -> None:
        """`latency` returns the latency model of this worker's steps."""
        self.running: dict[Sequence, None] = {}
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.waiting_tokens = 0
        self.num_reserved = 0
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_bypasses = max_bypasses
        self._latency = latency

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a sequence to the queue."""
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)
        self.waiting_tokens += sequence.remaining

    def run(self, sequence: Sequence) -> None:
        """Adds a sequence that has its blocks to the running set."""
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence. The caller frees its blocks."""
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
        """Whether a running slot is left after one more sequence is reserved, if only reserved sequences count."""
        return self.num_reserved + 1 < self._max_running

    @property
    def watermark_blocks(self) -> int:
        """Blocks to keep free for the growth of running and reserved sequences."""
        return watermark_blocks(len(self.running) + self.num_reserved, self._kv.pool.total)

    def may_bypass(self, precedence: Precedence) -> bool:
        """Whether a reservation, which does not queue here, may take blocks before the waiting sequences."""
        head = self._blocked_head(precedence)
        return head is None or head.bypassed < self._max_bypasses

    def count_bypass(self, precedence: Precedence) -> None:
        """Counts a bypass of the first waiting sequence, after a reservation took blocks."""
        if (head := self._blocked_head(precedence)) is not None:
            head.bypassed += 1

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step and allocates blocks for it."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            if sequence.remaining:  # 0 while its grammar has not taken its last token
                (decodes if sequence.remaining == 1 else prefills).append(sequence)
        prefills = in_order(prefills)
        step = SchedulerOutput(budget=self._max_step_tokens)
        first = prefills[0] if prefills else self.waiting.peek()
        self._schedule_decodes(step, decodes, others=first is not None)
        if first is not None:
            streams = [
                PacedStream(sequence.num_computed, sequence.request.tpot_s)
                for sequence in step.num_new
                if sequence.num_output
            ]
            allowed = prompt_budget(self._max_step_tokens, streams, self._latency(), first.num_computed)
            step.budget = min(step.budget, allowed)
            self._schedule_prompts(step, prefills)
        return step

    def _schedule_prompts(self, step: SchedulerOutput, prefills: list[Sequence]) -> None:
        """Gives the budget to running prompts, then to waiting ones."""
        for sequence in prefills:
            if step.budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING:
                step.give_chunk(sequence)
        self._admit(step)
        # The budget left over goes to the prompts that were cut, in order.
        for sequence, tokens in list(step.num_new.items()):
            if tokens < sequence.remaining:
                step.give(sequence, min(sequence.remaining - tokens, step.budget))

    def _schedule_decodes(self, step: SchedulerOutput, decodes: list[Sequence], *, others: bool) -> None:
        limit = max(1, int(step.budget * _DECODE_SHARE)) if others else step.budget
        rotate = len(decodes) > limit
        for sequence in decodes[:limit]:
            if sequence.status is not SequenceStatus.RUNNING or not self._grow(step, sequence):
                continue
            step.give(sequence, 1)
            if rotate:  # to the end: the decodes left out now come first in the next step
                self.running[sequence] = self.running.pop(sequence)

    def _grow(self, step: SchedulerOutput, sequence: Sequence) -> bool:
        """Allocates a block for a decode if it needs one, preempting as needed; False if it was preempted itself."""
        while not self._kv.grow(sequence):
            running = (other for other in self.running if other.remaining and not other.request.prefill_only)
            victim = take_last(running)
            step.take_back(victim)
            step.preempted += 1
            self._kv.free(victim)
            del self.running[victim]
            if victim.num_output:
                victim.due_s = -math.inf  # a client waits in the middle of its answer
            victim.misfit = True  # reservations that come before it are counted
            self.enqueue(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, step: SchedulerOutput) -> None:
        """Starts waiting sequences while there are budget, slots and blocks."""
        if not self.has_slot and (first := self.waiting.peek()) is not None:
            first.misfit = True  # reservations that take slots before it are counted
        # After a preemption blocks are short: start no waiting sequence in this step.
        if step.preempted or not len(self.waiting) or not self.has_slot:
            return
        misfits: list[Sequence] = []
        for sequence in offer_in_order(
            self._candidates(step),
            lambda sequence: self._start(sequence, step, misfits),
            max_bypasses=self._max_bypasses,
            max_looks=_MAX_MISFITS_A_STEP,
        ):
            self.run(sequence)
            step.give_chunk(sequence)
        for sequence in misfits:
            self.waiting.push(sequence)

    def _candidates(self, step: SchedulerOutput) -> Iterator[Sequence]:
        """Takes sequences off the queue for as long as one more may be tried in this step."""
        blocks_looked_up = 0
        while step.budget > 0 and self.has_slot and blocks_looked_up < _MAX_MISFIT_BLOCKS_A_STEP:
            if (sequence := self.waiting.pop()) is None:
                return
            yield sequence
            if sequence.misfit:
                blocks_looked_up += len(sequence.block_hashes)

    def _start(self, sequence: Sequence, step: SchedulerOutput, misfits: list[Sequence]) -> Offer:
        """Allocates blocks for a waiting sequence; appends it to `misfits` if there are too few."""
        before = sequence.remaining
        try:
            sequence.misfit = self._kv.start(sequence, watermark=self.watermark_blocks) is None
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

    def _blocked_head(self, precedence: Precedence) -> Sequence | None:
        """The first waiting sequence, if it does not fit and a request with this precedence comes after it."""
        first = self.waiting.peek()
        if first is None or not first.misfit or precedence.precedes(first.precedence):
            return None
        return first


MIN_PROMPT_TOKENS = 16
"""A step beside streams computes at least this many prompt tokens: prompts are never held for ever."""


@dataclass(frozen=True, slots=True)
class PacedStream:
    """A sequence that decodes. `tpot_s`: what its client was promised for each token; None: nothing."""

    context_tokens: int
    tpot_s: float | None = None


def prompt_budget(
    step_tokens: int, streams: Collection[PacedStream], latency: LatencyModel, context_tokens: int = 0
) -> int:
    """The most prompt tokens of a step of up to `step_tokens` tokens. `context_tokens`: what the first prompt has
    already computed or cached.
    """
    # 1. Nobody decodes: prompts have the whole step.
    if not streams:
        return step_tokens
    # 2. No stream has a target, or the steps are unmeasured: prompts have half of the step.
    target_s = min((stream.tpot_s for stream in streams if stream.tpot_s is not None), default=None)
    decode_s = latency.decode_step_s(len(streams), sum(stream.context_tokens for stream in streams))
    if target_s is None or decode_s is None or latency.prefill is None:
        return max(step_tokens // 2, 1)
    # 3. Prompts have what decoding leaves of the strictest target.
    tokens = latency.prefill.tokens_within(target_s - decode_s, context_tokens)
    return min(max(tokens, MIN_PROMPT_TOKENS), step_tokens)
