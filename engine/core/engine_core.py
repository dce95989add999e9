"""The engine core: takes requests, runs steps of the model, returns tokens and text."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from engine.core.engine import Engine, Held, Then
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.model_runner import DEFAULT_STEP_TOKENS, ModelRunner
from engine.core.output_processor import BegunStep, OutputProcessor, PendingResult
from engine.core.prompt_pacing import PromptPacing
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence, SequenceStatus
from engine.core.step_stats import StepMeter
from engine.core.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    RequestLimits,
    RequestOutput,
    ReservedBlocks,
    StepResult,
)
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import KvEventLog
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import Speculator
from engine.tiers.kv_tiers import KvTiers
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


class EngineCore(Engine):
    """The engine of splitserve's own runners: schedules, keeps the blocks, applies tokens.

    What one sequence raises in a step, its grammar or its text for example, fails that sequence alone. What the runner
    raises propagates, unless it is a SplitserveError. `abort` and `release_held` remove what a method that raised left.
    """

    paces_prompts = True

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        meter: StepMeter | None = None,
        tiers: KvTiers | None = None,
    ) -> None:
        """`drafter`: guesses tokens. `meter`: may know steps from before the start. `tiers`: end with the engine."""
        self._runner = runner
        self._clock = clock
        self._max_waiting = config.max_waiting_requests
        self.max_step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[runner.pool_memory.memory_kind]
        block_size = runner.layout.block_size_tokens
        self.kv_events = KvEventLog()
        pool = BlockPool(runner.num_blocks, self.kv_events)
        self._kv = KVCacheManager(pool, block_size, prefix_cache=config.prefix_cache, tiers=tiers)
        self._meter = meter or StepMeter()
        self.step_totals = self._meter.totals
        self._pacing = PromptPacing(self._meter, self._kv.expect, mixes=lambda: runner.mixes_steps)
        self._scheduler = Scheduler(
            self._kv,
            max_step_tokens=self.max_step_tokens,
            max_running=config.max_running_requests,
            max_bypasses=config.max_bypasses,
            pacing=self._pacing,
        )
        self._pacing.lend(runner.demand, self._scheduler.running, self._scheduler.waiting)
        self._limits = RequestLimits.of(runner.facts, config.context_tokens, runner.num_blocks * block_size)
        self._live: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._reserved: dict[int, Sequence] = {}
        self._writers: dict[int, list[int]] = {}
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._prompt_room = self._arrivals = 0  # the first: blocks that reservations leave
        self._changed = False  # whether the next step may do something that the last one could not
        self._step: BegunStep | None = None
        self._pending = PendingResult(tokenizer, self._end_if_live, late=runner.overlaps)
        if tiers is not None:
            tiers.attach(pool, self.kv_events, self._blocks_freed, lambda: self._meter.prompt_fit.latest)
        self._speculator = Speculator(drafter, self._kv, self._limits, self._pacing) if drafter else None
        self._outputs = OutputProcessor(
            block_size, self._kv.cache_computed, self._limits, self._pending, self._end
        )

    @property
    def pool(self) -> BlockPool:
        """The block pool, for inspection."""
        return self._kv.pool

    @property
    def context_tokens(self) -> int:
        """The longest sequence here, prompt plus output: the bounds of model, settings and pool."""
        return self._limits.sequence_tokens

    def add_request(self, request: EngineRequest) -> None:
        """See `Engine`."""
        self._check(request)
        waiting, waiting_tokens = self._waiting()
        if waiting >= self._max_waiting:
            message = f"{self._max_waiting} requests are waiting already"
            retry_s = self._meter.rates.retry_after_s(waiting_tokens)
            raise ResourceExhaustedError(message, reason="QUEUE_FULL", retry_after_s=retry_s)
        self._kv.bring(self._register(Sequence(request, self._arrivals)), self._scheduler.enqueue_waiting)

    def abort(self, request_id: str) -> bool:
        """See `Engine`."""
        dropped = self._pending.drop(request_id)
        if self._step is not None:
            dropped |= self._step.result.drop(request_id)
        sequence = self._live.get(request_id)
        if sequence is None:
            return dropped
        self._end(sequence)
        if not self.has_work():  # no step follows that would say so
            self._runner.rest()
        return True

    def release_held(self, request_id: str) -> bool:
        """See `Engine`."""
        if request_id in self._live:
            raise BrokenInvariantError(f"{request_id} has not ended")
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.ENDED
        self._kv.free(sequence)
        self._changed = True
        return True

    def hold_prefix(self, request: EngineRequest, held: Held) -> None:
        """See `Engine`."""
        self._check(request)
        self._kv.bring(self._register(Sequence(request, self._arrivals)), partial(self._hold, held))

    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """See `Engine`."""
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

    def read_back(self, request: EngineRequest, bytes_per_s: float, then: Then, again: Then | None) -> bool:
        """See `Engine`."""
        self._require_no_step()
        return self._kv.read_back(Sequence(request, 0), bytes_per_s, then, again)

    def reservations_wait(self, waits: bool) -> None:
        """See `Engine`."""
        self._pacing.reservation_waits = waits

    def keep_prompt_room(self) -> None:
        """See `Engine`."""
        longest = blocks_for(self._limits.sequence_tokens, self._kv.block_size)
        self._prompt_room = max(1, min(longest, self.pool.total // 2))

    def cached_tokens(self, request: EngineRequest) -> int:
        """See `Engine`."""
        return self._kv.reachable_tokens(Sequence(request, 0))

    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """See `Engine`."""
        self._require_no_step()
        self._limits.check_first_token(first_token_id)
        sequence = self._reserved.pop(reservation, None)
        if sequence is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        self._scheduler.num_reserved -= 1
        sequence.reservation = None
        sequence.num_computed = len(sequence.tokens)
        self._kv.cache_computed(sequence)
        if sequence.request.prefix_only:
            self._end(sequence)
            return RequestOutput(sequence.request_id, 0, finish_reason=FinishReason.LENGTH)
        self._scheduler.run(sequence)
        if self._pacing.active:
            self._pacing.admitted(sequence, self._clock())
        self._changed = True
        return self._outputs.append_given(sequence, first_token_id)

    def release_writer(self, reservation: int) -> bool:
        """See `Engine`."""
        blocks = self._writers.pop(reservation, None)
        if blocks is None:
            return False
        self.pool.release_writer(blocks)
        self._changed = True
        return True

    def has_work(self) -> bool:
        """See `Engine`."""
        rests = self._pacing.active and self._pacing.rests(self._clock())
        ready = self._changed and not rests and bool(self._scheduler.running or self._scheduler.waiting)
        return ready or self.next_deadline() <= self._clock()

    def next_deadline(self) -> float:
        """See `Engine`."""
        first = self._deadlines.peek()
        due_s = float("inf") if first is None else first[0]
        return min(self._pacing.next_look_s, due_s) if self._pacing.active else due_s

    @property
    def lent(self) -> bool:
        """See `Engine`."""
        return self._runner.is_lent()

    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """See `Engine`; for the time see `StepMeter.expected_s`."""
        self._require_no_step()
        began_s = self._clock()
        self._meter.begin(began_s)
        result = StepResult()
        self._outputs.expire(self._deadlines, began_s, result)
        step = self._scheduler.schedule(began_s)
        drafts = self._speculator.plan(step, self._scheduler.watermark_blocks) if self._speculator else {}
        batch = self._outputs.batch(step, drafts, result)
        # After an empty step the next one is empty too, until something else sets the flag.
        self._changed = bool(step.num_new or step.preempted or step.failed)
        result.scheduled_tokens = sum(step.num_new.values())
        computing(self._meter.expected_s(step.num_new))
        self._step = BegunStep.at(self._runner, began_s, step.num_new, batch, result, drafts)

    def finish_step(self) -> None:
        """See `Engine`."""
        step, self._step = self._step, None
        assert step is not None
        self._outputs.process(step)
        ended_s = self._clock()
        step.result.duration_s = ended_s - step.began_s
        self._pending.put(step.result)
        if self._pacing.active:
            self._pacing.stepped(ended_s, step.num_new, step.outcomes)
        more, runner = self.has_work(), self._runner
        work = step.num_new, more, runner.speedup, step.outcomes
        duration_s = self._meter.end(ended_s, *work, is_first=runner.prepared)
        if self._speculator:
            self._speculator.stepped(step.num_new, step.outcomes, duration_s, is_first=runner.prepared)
        if not more:
            self._runner.rest()

    @property
    def result_can_wait(self) -> bool:
        """See `Engine`. True if there is a next step to begin, and no peer waits for the result's KV."""
        return self._runner.overlaps and self._pending.can_wait and self.has_work()

    def take_result(self) -> StepResult | None:
        """See `Engine`."""
        return self._pending.take()

    def load(self) -> EngineLoad:
        """The present load. Costs O(running)."""
        work = self._scheduler.running, *self._waiting(), len(self._pacing.late)
        return self._meter.load(self._kv.counts(), *work, shares_cores=self._runner.shares_cores)

    def close(self) -> None:
        """Closes those who copy the runner's blocks, the drafter, and the runner."""
        for each in (self._kv, self._speculator, self._runner):
            if each is not None:
                each.close()

    def _waiting(self) -> tuple[int, int]:
        """Requests that wait, for KV from lower tiers, too, and their tokens."""
        queue, kv = self._scheduler, self._kv
        return len(queue.waiting) + len(kv.reading), queue.waiting_tokens + kv.reading_tokens

    def _hold(self, held: Held, sequence: Sequence) -> None:
        if self._live.get(sequence.request_id) is sequence:
            self._kv.hold(sequence)
            self._end(sequence)
            held(sequence.refusal or sequence.block_ids)

    def _blocks_freed(self) -> None:
        self._changed = True

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
        self._kv.check(request)

    def _register(self, sequence: Sequence) -> Sequence:
        self._arrivals += 1
        self._live[sequence.request_id] = sequence
        self._pacing.active |= sequence.request.targets is not None
        if sequence.request.deadline_s != float("inf"):
            self._deadlines.push(sequence.request.deadline_s, sequence)
        self._changed = True
        return sequence

    def _end(self, sequence: Sequence) -> None:
        """Removes a live sequence everywhere, and frees its blocks unless they must be held."""
        del self._live[sequence.request_id]
        if self._speculator:
            self._speculator.forget(sequence)
        self._deadlines.discard(sequence)
        self._scheduler.remove(sequence)
        self._changed = True
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
