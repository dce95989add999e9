"""The engine: requests in, steps of the model, tokens and text out."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.block_pool import BlockPool
from engine.cache_log import CacheLog
from engine.kv_cache_manager import KVCacheManager
from engine.lazy_heap import LazyHeap
from engine.limits import RequestLimits
from engine.pending_result import PendingResult
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.step_meter import StepMeter
from engine.step_outcome import BegunStep, StepOutcome
from engine.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    RequestOutput,
    ReservedBlocks,
    StepResult,
)
from splitserve.config import EngineConfig
from splitserve.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from splitserve.tokenizer import Tokenizer

DEFAULT_STEP_TOKENS = {"DRAM": 512, "VRAM": 2048}
"""By where the pool lies. What fills the device is enough: all but the last chunk's KV then travels while others
are computed, and a cancelled prompt stops soon."""


class EngineCore:
    """Single-threaded; every method is called on the thread that owns the runner.

    A request comes in through `add_request` (computed here) or `reserve` and `admit` (a peer writes the
    KV of its tokens). It ends with an output that has a finish reason, or silently through `abort`.

    A step has two halves. Between them the runner may be computing, so no block is given to anybody: `add_request`,
    `reserve` and `admit` have to wait. All else may be called; blocks that are let go meanwhile stay as they are.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock
        self._max_waiting = config.max_waiting_requests
        self.max_step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[runner.pool_memory.memory_kind]
        block_size = runner.layout.block_size_tokens
        self.cache_log = CacheLog()
        """What the prefix cache gains and loses; may be read on any thread."""
        self._pool = BlockPool(runner.num_blocks, self.cache_log)
        self._kv = KVCacheManager(self._pool, block_size, prefix_cache=config.prefix_cache)
        self._scheduler = Scheduler(
            self._kv,
            max_step_tokens=self.max_step_tokens,
            max_running=config.max_running_requests,
            max_bypasses=config.max_bypasses,
        )
        facts = runner.facts
        context = min(facts.context_tokens, config.context_tokens or facts.context_tokens)
        self._limits = RequestLimits(context, runner.num_blocks * block_size, facts.vocabulary_size)
        self._live: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._reserved: dict[int, Sequence] = {}
        self._writers: dict[int, list[int]] = {}
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._arrivals = 0
        self._meter = StepMeter()
        self._changed = False
        self._step: BegunStep | None = None
        self._pending = PendingResult(tokenizer, late=runner.overlaps)
        self._outcome = StepOutcome(self._kv, self._limits, self._pending, self._end)

    @property
    def pool(self) -> BlockPool:
        """The block accounts, to look at."""
        return self._pool

    @property
    def context_tokens(self) -> int:
        """Prompt plus output tokens that a sequence can have here, the pool's size considered."""
        return self._limits.sequence_tokens

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        A `prefill_only` request that was added must get one `release_held` after its end.
        Raises InvalidArgumentError (what can never be computed, an id in use), ResourceExhaustedError
        (QUEUE_FULL with a retry hint, KV_POOL_TOO_SMALL without).
        """
        self._check(request)
        if len(self._scheduler.waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} requests are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=self._meter.rates.retry_after_s(self._scheduler.waiting_tokens),
            )
        sequence = Sequence(request, self._arrivals)
        self._register(sequence)
        self._scheduler.enqueue(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request without output; whether it was alive. Idempotent. Output that was not taken yet is dropped.

        Reserved blocks stay quarantined until `release_writer`, those of a `prefill_only` request
        held until `release_held`.
        """
        dropped = self._pending.drop(request_id)
        if self._step is not None:
            dropped |= self._step.result.drop(request_id)
        sequence = self._live.get(request_id)
        if sequence is None:
            return dropped
        self._end(sequence)
        return True

    def release_held(self, request_id: str) -> bool:
        """Frees the blocks of an ended `prefill_only` request; whether there was one. Idempotent."""
        if request_id in self._live:
            raise AssertionError(f"{request_id} has not ended")
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.ENDED
        self._kv.free(sequence)
        self._changed = True
        return True

    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """Sets blocks aside for the KV of all of `request.token_ids`, to be written by a peer.

        None when there is no room or no running slot now: try again later. Leading full blocks that are
        cached here are shared; the others belong to the request and, until `release_writer`, to the
        writer. Raises like `add_request` for what can never fit.
        """
        self._check(request)
        if request.prefill_only:
            raise AssertionError("a reservation is for decoding")
        if reservation in self._reserved or reservation in self._writers:
            raise AssertionError(f"reservation {reservation} is in use")
        if not self._scheduler.has_slot or not self._scheduler.may_overtake(request.priority):
            return None
        sequence = Sequence(request, self._arrivals)
        fresh = self._kv.start(sequence, spare=self._scheduler.spare_blocks, writer=True)
        if fresh is None:
            return None
        self._scheduler.overtaken(request.priority)
        self._register(sequence)
        sequence.status, sequence.reservation = SequenceStatus.RESERVED, reservation
        self._reserved[reservation] = sequence
        self._writers[reservation] = fresh
        self._scheduler.num_reserved += 1
        return ReservedBlocks(tuple(fresh), sequence.cached_tokens)

    def cached_tokens(self, request: EngineRequest) -> int:
        """Leading tokens of a request that need not be computed here, as the prefix cache stands now."""
        wanted = len(request.token_ids) - 1
        return len(self._kv.computed_prefix(Sequence(request, 0), wanted)) * self._kv.block_size

    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """The KV of a reservation is there: the sequence decodes on from its first output token.

        The first token's text counts as emitted (by the one who sampled it). Returns the last output
        if the answer ends right here, else None. Raises NotFoundError for a reservation that is
        not live (any more), InvalidArgumentError for a token outside the vocabulary or the request's grammar.
        """
        if not 0 <= first_token_id < self._limits.vocabulary_size:
            raise InvalidArgumentError(
                f"first token {first_token_id} is out of range", field="first_token_id"
            )
        sequence = self._reserved.pop(reservation, None)
        if sequence is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        self._scheduler.num_reserved -= 1
        sequence.reservation = None
        sequence.num_computed = len(sequence.tokens)
        self._kv.cache_computed(sequence)
        self._scheduler.run(sequence)
        self._changed = True
        shows, reason = self._outcome.append(sequence, first_token_id)
        text = sequence.text(self._tokenizer)
        if shows and text.push(first_token_id)[1]:
            reason = FinishReason.STOP
        if reason is None:
            return None
        rest = text.flush() if reason is FinishReason.LENGTH else ""
        self._end(sequence)
        return RequestOutput(sequence.request_id, sequence.num_output, text=rest, finish_reason=reason)

    def release_writer(self, reservation: int) -> bool:
        """The writer of a reservation has let go of its blocks; whether it had any hold. Idempotent."""
        blocks = self._writers.pop(reservation, None)
        if blocks is None:
            return False
        self._pool.release_writer(blocks)
        self._changed = True
        return True

    def has_work(self) -> bool:
        """Whether `step` can do anything now; False while everything waits for blocks."""
        if self._changed and (self._scheduler.running or self._scheduler.waiting):
            return True
        return self.next_deadline() <= self._clock()

    def next_deadline(self) -> float:
        """When the next request's time is up, on the engine's clock; infinity if none has a deadline."""
        first = self._deadlines.peek()
        return float("inf") if first is None else first[0]

    def step(self) -> StepResult:
        """Expires, schedules, computes once, and returns what came of it: both halves in a row.

        A SplitserveError of the runner fails the batch's requests; any other exception propagates.
        """
        self.begin_step()
        self.finish_step()
        result = self.take_result()
        assert result is not None
        return result

    def begin_step(self) -> None:
        """The first half of a step: expires, schedules and queues it at the runner."""
        began_s = self._clock()
        self._meter.begin(began_s)
        result = StepResult()
        self._expire(began_s, result)
        step = self._scheduler.schedule()
        # An empty step stays empty until something changes from outside.
        self._changed = bool(step.num_new or step.preempted)
        for sequence in step.num_new:
            if not sequence.started:
                sequence.started = True
                result.started.append(sequence.request_id)
        result.scheduled_tokens = sum(step.num_new.values())
        self._step = BegunStep.at(self._runner, began_s, step.num_new, result)

    def finish_step(self) -> None:
        """The second half: waits for the tokens and decides which sequences go on. `take_result` has the outcome."""
        step, self._step = self._step, None
        assert step is not None
        self._outcome.take(step)
        step.result.duration_s = self._clock() - step.began_s
        self._pending.put(step.result)
        self._meter.end(step.began_s + step.result.duration_s, step.num_new, more=self.has_work())

    @property
    def result_can_wait(self) -> bool:
        """Whether the latest result is better taken after the next `begin_step`.

        It is if the runner has work for then, and no peer waits for KV.
        """
        return self._runner.overlaps and self._pending.can_wait and self.has_work()

    def take_result(self) -> StepResult | None:
        """What came of the latest finished step, once; to be taken before the next one is finished."""
        return self._pending.take()

    def load(self) -> EngineLoad:
        """How busy the engine is. Costs O(running)."""
        counts = self._pool.counts()
        running = self._scheduler.running
        prompts = sum(sequence.remaining for sequence in running if sequence.remaining > 1)
        return EngineLoad(
            waiting_requests=len(self._scheduler.waiting),
            running_requests=len(running),
            waiting_tokens=self._scheduler.waiting_tokens + prompts,
            total_blocks=counts.total,
            free_blocks=counts.free,
            reserved_blocks=counts.reserved,
            quarantined_blocks=counts.quarantined,
            referenced_blocks=counts.referenced,
            prefill_tokens_per_s=self._meter.rates.prefill_tokens_per_s,
            decode_step_s=self._meter.rates.decode_step_s,
            step_fit=self._meter.fit.latest,
        )

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()

    def _check(self, request: EngineRequest) -> None:
        if self._step is not None:
            raise AssertionError("a step is under way")
        known = request.request_id in self._live or request.request_id in self._held
        if known or self._pending.holds(request.request_id):
            raise InvalidArgumentError(
                f"request {request.request_id} is in progress here",
                reason="DUPLICATE_REQUEST",
                field="request_id",
            )
        self._limits.check(request)

    def _register(self, sequence: Sequence) -> None:
        self._arrivals += 1
        self._live[sequence.request_id] = sequence
        if sequence.request.deadline_s != float("inf"):
            self._deadlines.push(sequence.request.deadline_s, sequence)
        self._changed = True

    def _end(self, sequence: Sequence) -> None:
        """Takes a live sequence out of everything and lets go of its blocks."""
        del self._live[sequence.request_id]
        self._deadlines.discard(sequence)
        self._scheduler.remove(sequence)
        self._changed = True
        if sequence.reservation is not None:
            del self._reserved[sequence.reservation]
            self._scheduler.num_reserved -= 1
            sequence.reservation = None
        if sequence.request.prefill_only:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.request_id] = sequence
        else:
            sequence.status = SequenceStatus.ENDED
            self._kv.free(sequence)

    def _expire(self, now: float, result: StepResult) -> None:
        while (first := self._deadlines.peek()) is not None and first[0] <= now:
            sequence = first[1]
            message = f"the request's deadline passed while it was {sequence.status.value}"
            self._outcome.fail(sequence, "DEADLINE_EXCEEDED", message, result)
