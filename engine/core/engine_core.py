"""The engine core: takes requests, runs steps of the model, returns tokens and text."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from engine.core.engine import (
    Engine,
    EngineLoad,
    EngineRequest,
    RequestLimits,
    RequestOutput,
    ReservedBlocks,
    StepResult,
)
from engine.core.model_runner import DEFAULT_STEP_TOKENS, ModelRunner
from engine.core.output_processor import AfterAnswer, BegunStep, OutputProcessor, PendingResult, begin_at
from engine.core.scheduler import KVCacheManager, Scheduler
from engine.core.sequence import Sequence, SequenceStatus
from engine.kv_cache.block_pool import BlockPool, KvEventLog
from engine.scheduling.step_times import StepMeter, StepPart
from splitserve.config.engine import EngineConfig
from splitserve.errors import (
    BrokenInvariantError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from splitserve.generation.kv_blocks import blocks_for
from splitserve.models.tokenizer import Tokenizer
from splitserve.queues import LazyHeap

IDLE_WAIT_S = 0.001
"""How long an engine without other work waits for a grammar, before it handles calls of its worker again."""


class EngineCore(Engine):
    """The engine of splitserve's own runners: schedules, keeps the blocks, applies tokens.

    An error of one sequence in a step, for example of its grammar or its text, fails only that sequence. An error of
    the runner propagates, unless it is a SplitserveError. `abort` and `release_held` clean up after a method that
    raised.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._max_waiting = config.max_waiting_requests
        self.max_step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[runner.pool_memory.memory_kind]
        block_size = runner.layout.block_size_tokens
        self.kv_events = KvEventLog()
        self.pool = BlockPool(runner.num_blocks, self.kv_events)
        """The block pool, public for inspection."""
        self._kv = KVCacheManager(self.pool, block_size, prefix_cache=config.prefix_cache)
        self._meter = StepMeter()
        self.step_totals = self._meter.totals
        self._scheduler = Scheduler(
            self._kv,
            max_step_tokens=self.max_step_tokens,
            max_running=config.max_running_requests,
            max_bypasses=config.max_bypasses,
            latency=lambda: self._meter.latency.model,
        )
        self._limits = RequestLimits.of(runner.facts, config.context_tokens, runner.num_blocks * block_size)
        self._live: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._reserved: dict[int, Sequence] = {}
        self._writers: dict[int, list[int]] = {}
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._arrivals = 0
        self._prompt_room = 0
        """Blocks that reservations leave for a prompt; see `keep_prompt_room`."""
        self._changed = False
        """Whether the next step may do something that the last one could not."""
        self._step: BegunStep | None = None
        self._pending = PendingResult(tokenizer, self._end_if_live, late=runner.overlaps)
        self._awaiting: dict[Sequence, AfterAnswer] = {}
        """Sequences that wait for an answer of their grammar, and the function that then goes on with each."""
        self._outputs = OutputProcessor(
            block_size,
            self._kv.cache_computed,
            self._limits,
            self._pending,
            self._end,
            self._awaiting.__setitem__,
        )

    @override
    def add_request(self, request: EngineRequest) -> None:
        self._check(request)
        if len(self._scheduler.waiting) >= self._max_waiting:
            message = f"{self._max_waiting} requests are waiting already"
            retry_s = self._meter.retry_after_s(self._scheduler.waiting_tokens)
            raise ResourceExhaustedError(message, reason="QUEUE_FULL", retry_after_s=retry_s)
        sequence = self._register(Sequence(request, self._arrivals))
        if sequence.matcher is None:
            self._scheduler.enqueue(sequence)
        else:
            self._awaiting[sequence] = lambda result: self._scheduler.enqueue(sequence)

    @override
    def abort(self, request_id: str) -> bool:
        dropped = self._pending.drop(request_id)
        if self._step is not None:
            dropped |= self._step.result.drop(request_id)
        sequence = self._live.get(request_id)
        if sequence is None:
            return dropped
        self._end(sequence)
        return True

    @override
    def release_held(self, request_id: str) -> bool:
        if request_id in self._live:
            raise BrokenInvariantError(f"{request_id} has not ended")
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.ENDED
        self._kv.free(sequence)
        self._changed = True
        return True

    @override
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        self._check(request)
        if request.prefill_only:
            raise BrokenInvariantError("a reservation is for decoding")
        if reservation in self._reserved or reservation in self._writers:
            raise BrokenInvariantError(f"reservation {reservation} is in use")
        if not self._scheduler.has_slot or not self._scheduler.may_bypass(request.precedence):
            return None
        watermark = self._scheduler.watermark_blocks
        if self._prompt_room and self._reserved:
            if not self._scheduler.may_reserve_slot:
                return None
            watermark += self._prompt_room + 1  # the watermark grows with this reservation
        sequence = Sequence(request, self._arrivals)
        fresh = self._kv.start(sequence, watermark=watermark, writer=True)
        if fresh is None:
            return None
        self._scheduler.count_bypass(request.precedence)
        self._register(sequence)
        sequence.status, sequence.reservation = SequenceStatus.RESERVED, reservation
        self._reserved[reservation] = sequence
        self._writers[reservation] = fresh
        self._scheduler.num_reserved += 1
        return ReservedBlocks(tuple(fresh), sequence.cached_tokens)

    @override
    def keep_prompt_room(self, keeps: bool) -> None:
        longest = blocks_for(self._limits.sequence_tokens, self._kv.block_size)
        self._prompt_room = max(1, min(longest, self.pool.total // 2)) if keeps else 0

    @override
    def cached_tokens(self, request: EngineRequest) -> int:
        sequence = Sequence(request, 0)
        return len(self._kv.computed_prefix(sequence, sequence.reusable_tokens)) * self._kv.block_size

    @override
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        self._require_no_step()
        self._limits.check_first_token(first_token_id)
        sequence = self._reserved.pop(reservation, None)
        if sequence is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        self._scheduler.num_reserved -= 1
        sequence.reservation = None
        sequence.num_computed = len(sequence.tokens)
        self._kv.cache_computed(sequence)
        self._scheduler.run(sequence)
        self._changed = True
        return self._outputs.append_given(sequence, first_token_id)

    @override
    def release_writer(self, reservation: int) -> bool:
        blocks = self._writers.pop(reservation, None)
        if blocks is None:
            return False
        self.pool.release_writer(blocks)
        self._changed = True
        return True

    @override
    def has_work(self) -> bool:
        ready = self._changed and bool(self._scheduler.running or self._scheduler.waiting)
        return ready or bool(self._awaiting) or self.next_deadline() <= self._clock()

    @override
    def next_deadline(self) -> float:
        first = self._deadlines.peek()
        return float("inf") if first is None else first[0]

    @override
    def collect(self) -> None:
        """Waits, at most IDLE_WAIT_S, only if no sequence can be computed meanwhile."""
        self._require_no_step()
        if not self._awaiting:
            return
        if not len(self._scheduler.waiting) and self._awaiting.keys() >= self._scheduler.running.keys():
            self._meter.rest()
            _answered(next(iter(self._awaiting)), IDLE_WAIT_S)
        for sequence in [waiting for waiting in self._awaiting if _answered(waiting)]:
            self._changed = True
            self._outputs.follow(sequence, self._awaiting.pop(sequence), self._pending.result)

    @override
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        self._require_no_step()
        began_s = self._clock()
        self._meter.begin(began_s)
        result = StepResult()
        self._outputs.expire(self._deadlines, began_s, result)
        step = self._scheduler.schedule()
        batch = self._outputs.batch(step, result)
        # After an empty step the next one is empty too, until something else sets the flag.
        self._changed = bool(step.num_new or step.preempted or step.failed)
        result.scheduled_tokens = sum(step.num_new.values())
        parts = [StepPart(sequence.num_computed, tokens) for sequence, tokens in step.num_new.items()]
        computing(self._meter.expect(parts))
        self._step = BegunStep(began_s, step.num_new, result, begin_at(self._runner, batch))

    @override
    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        self._runner.poll_while_computing(poll)

    @override
    def finish_step(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        self._outputs.process(step)
        ended_s = self._clock()
        step.result.duration_s = ended_s - step.began_s
        self._pending.put(step.result)
        self._meter.end(ended_s, more=self.has_work(), is_first=self._runner.prepared)

    @property
    @override
    def result_can_wait(self) -> bool:
        """True if there is a next step to begin, and no peer waits for the result's KV."""
        return self._runner.overlaps and self._pending.can_wait and self.has_work()

    @override
    def take_result(self) -> StepResult | None:
        return self._pending.take()

    @override
    def load(self) -> EngineLoad:
        """Costs O(running)."""
        blocks, running = self.pool.counts(), self._scheduler.running
        prompts = [sequence.remaining for sequence in running if sequence.remaining > 1]
        return EngineLoad(
            waiting_requests=len(self._scheduler.waiting),
            running_requests=len(running),
            waiting_tokens=self._scheduler.waiting_tokens + sum(prompts),
            total_blocks=blocks.total,
            free_blocks=blocks.free,
            reserved_blocks=blocks.reserved,
            quarantined_blocks=blocks.quarantined,
            referenced_blocks=blocks.referenced,
            latency=self._meter.latency.model,
            streams=len(running) - len(prompts),
        )

    @override
    def close(self) -> None:
        self._runner.close()

    def _require_no_step(self) -> None:
        if self._step is not None:
            raise BrokenInvariantError("a step is under way")

    def _check(self, request: EngineRequest) -> None:
        self._require_no_step()
        known = request.request_id in self._live or request.request_id in self._held
        if known or self._pending.holds(request.request_id):
            message = f"request {request.request_id} is in progress here"
            raise InvalidArgumentError(message, reason="DUPLICATE_REQUEST", field="request_id")
        self._limits.check(request)

    def _register(self, sequence: Sequence) -> Sequence:
        self._arrivals += 1
        self._live[sequence.request_id] = sequence
        if sequence.request.deadline_s != float("inf"):
            self._deadlines.push(sequence.request.deadline_s, sequence)
        self._changed = True
        return sequence

    def _end(self, sequence: Sequence) -> None:
        """Removes a live sequence everywhere, and frees its blocks unless they must be held."""
        del self._live[sequence.request_id]
        self._awaiting.pop(sequence, None)
        self._deadlines.discard(sequence)
        self._scheduler.remove(sequence)
        self._changed = True
        sequence.close_matcher()
        if sequence.reservation is not None:
            self._scheduler.num_reserved -= 1
            del self._reserved[sequence.reservation]
            sequence.reservation = None
        if sequence.request.prefill_only:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.request_id] = sequence
        else:
            sequence.status = SequenceStatus.ENDED
            self._kv.free(sequence)

    def _end_if_live(self, sequence: Sequence) -> None:
        if self._live.get(sequence.request_id) is sequence:
            self._end(sequence)


def _answered(sequence: Sequence, wait_s: float = 0.0) -> bool:
    """Whether a sequence's grammar has answered. A grammar that raises has answered too: its sequence then fails."""
    try:
        return sequence.matcher is None or sequence.matcher.wait(wait_s)
    except BaseException:
        return True
