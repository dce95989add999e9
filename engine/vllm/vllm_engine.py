"""An engine whose steps vLLM schedules and computes. Sampling, stops, text and the handoff stay splitserve's."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

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
from engine.core.output_processor import AfterAnswer, BegunStep, OutputProcessor, PendingResult
from engine.core.sequence import Sequence, SequenceStatus
from engine.runner.structured_output import MASK_WAIT_S
from engine.scheduling.step_times import StepMeter, StepPart
from engine.vllm.boot import StartedVllm
from engine.vllm.bridge import VllmRow
from engine.vllm.options import step_tokens_of
from engine.vllm.rows import VllmRows
from splitserve.config.engine import EngineConfig
from splitserve.errors import (
    BrokenInvariantError,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from splitserve.generation.kv_blocks import blocks_for
from splitserve.models.tokenizer import Tokenizer
from splitserve.queues import LazyHeap


class VllmEngine(Engine):
    """Drives a vLLM engine of this process, one step at a time.

    A reservation runs a step: only then does vLLM give blocks to a request. The step also computes whatever else is to
    be computed; its outputs come with the next `take_result`.
    """

    def __init__(
        self,
        vllm: StartedVllm,
        config: EngineConfig,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vllm = vllm
        self._clock = clock
        self._max_waiting = config.max_waiting_requests
        self.max_step_tokens = step_tokens_of(config)
        self._max_running = min(config.max_running_requests, self.max_step_tokens)
        self.kv_events = vllm.events
        self._block_size = vllm.memory.layout.block_size_tokens
        # Block 0 stands for no block at vLLM.
        self._total_blocks = vllm.memory.request_blocks - 1
        pool_tokens = self._total_blocks * self._block_size
        self._limits = RequestLimits.of(vllm.facts, config.context_tokens, pool_tokens)
        self._rows = VllmRows(vllm, config.max_bypasses)
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._meter = StepMeter()
        self.step_totals = self._meter.totals
        self._changed = False
        """Whether the next step may do something that the last one could not."""
        self._begun = False
        self._pending = PendingResult(tokenizer, self._end_if_live, late=False)
        self._awaiting: dict[Sequence, AfterAnswer] = {}
        """Sequences whose grammar has yet to take their last token, and what follows then."""
        self._outputs = OutputProcessor(
            self._block_size,
            lambda sequence: None,
            self._limits,
            self._pending,
            self._end,
            self._awaiting.__setitem__,
        )

    @override
    def add_request(self, request: EngineRequest) -> None:
        self._check(request)
        waiting = [row.sequence for row in self._rows.live if row.sequence.status is SequenceStatus.WAITING]
        if len(waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} requests are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=self._meter.retry_after_s(sum(s.remaining for s in waiting)),
            )
        self._enter(request, awaits_kv=False)

    @override
    def abort(self, request_id: str) -> bool:
        dropped = self._pending.drop(request_id)
        row = self._rows.find(request_id)
        if row is None:
            return dropped
        self._end(row.sequence)
        return True

    @override
    def release_held(self, request_id: str) -> bool:
        if self._rows.find(request_id) is not None:
            raise BrokenInvariantError(f"{request_id} has not ended")
        released = self._rows.release_held(request_id)
        self._changed |= released
        return released

    @override
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        self._check(request)
        if request.prefill_only:
            raise BrokenInvariantError("a reservation is for decoding")
        if self._rows.knows_reservation(reservation):
            raise BrokenInvariantError(f"reservation {reservation} is in use")
        # vLLM counts no slot for a request that waits for KV, but needs one to admit it.
        if len(self._rows.live) >= self._max_running:
            return None
        if blocks_for(len(request.token_ids), self._block_size) > self._vllm.free_blocks():
            return None
        row = self._enter(request, awaits_kv=True)
        if self._rows.waits_for_room(row):
            self._end(row.sequence)
            return None
        self._run_step()
        if row.reserved is None:  # vLLM gave its blocks or its tokens to others
            self._end(row.sequence)
            return None
        self._rows.reserve(row, reservation)
        return row.reserved

    @override
    def keep_prompt_room(self, keeps: bool) -> None:
        """Raises ConfigError: vLLM's scheduler keeps no room."""
        raise ConfigError("engine.kind: engine vllm keeps no room for prompts", field="engine.kind")

    @override
    def cached_tokens(self, request: EngineRequest) -> int:
        """Always 0: vLLM tells of a hit only when it schedules the request."""
        return 0

    @override
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """The next step computes the prompt's last position once more, and vLLM takes the first token there."""
        self._require_no_step()
        self._limits.check_first_token(first_token_id)
        row = self._rows.admit(reservation)
        if row is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        sequence = row.sequence
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed = len(sequence.tokens)
        self._changed = True
        output = self._outputs.append_given(sequence, first_token_id)
        result = StepResult([output] if output is not None else [])
        self._settle(result)
        return result.outputs[0] if result.outputs else None

    @override
    def release_writer(self, reservation: int) -> bool:
        released = self._rows.release_writer(reservation)
        self._changed |= released
        return released

    @override
    def has_work(self) -> bool:
        if self._rows.must_report or (self._changed and self._rows.has_unreserved):
            return True
        return self.next_deadline() <= self._clock()

    @override
    def next_deadline(self) -> float:
        first = self._deadlines.peek()
        return float("inf") if first is None else first[0]

    @override
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """The step itself is computed by `finish_step`."""
        self._require_no_step()
        self._begun = True
        computing(None)

    @override
    def finish_step(self) -> None:
        self._begun = False
        self._run_step()

    @property
    @override
    def result_can_wait(self) -> bool:
        return False

    @override
    def take_result(self) -> StepResult | None:
        return self._pending.take()

    @override
    def load(self) -> EngineLoad:
        """Costs O(live requests)."""
        sequences = [row.sequence for row in self._rows.live]
        waiting = [sequence for sequence in sequences if sequence.status is SequenceStatus.WAITING]
        running = [sequence for sequence in sequences if sequence.status is SequenceStatus.RUNNING]
        prompts = sum(sequence.remaining for sequence in running if sequence.remaining > 1)
        free = self._vllm.free_blocks()
        reserved, quarantined = self._rows.reserved_blocks()
        return EngineLoad(
            waiting_requests=len(waiting),
            running_requests=len(running),
            waiting_tokens=sum(sequence.remaining for sequence in waiting) + prompts,
            total_blocks=self._total_blocks,
            free_blocks=free,
            reserved_blocks=reserved,
            quarantined_blocks=quarantined,
            referenced_blocks=max(0, self._total_blocks - free - reserved - quarantined),
            latency=self._meter.latency.model,
        )

    @override
    def close(self) -> None:
        self._vllm.close()

    def _run_step(self) -> None:
        """Runs a step of vLLM and adds its result to the one that was not taken yet."""
        began_s, earlier = self._clock(), self._pending.take()
        self._meter.begin(began_s)
        result = StepResult()
        self._outputs.expire(self._deadlines, began_s, result)
        for row, error in self._rows.give_parked():
            self._outputs.fail(row.sequence, error.reason, error.message, result)
        reported = self._rows.must_report
        ended = self._rows.step()
        scheduled = [row for row in self._vllm.bridge.scheduled if row.sequence.request_id in self._rows]
        for row in scheduled:
            self._start(row, result)
        self._meter.expect([StepPart(row.sequence.num_computed, row.num_new) for row in scheduled])
        result.scheduled_tokens = sum(row.num_new for row in scheduled)
        self._changed = bool(scheduled) or reported  # what was reported is acted on in the next step
        for row in scheduled:
            if row.failure is not None:
                self._outputs.fail(row.sequence, row.failure.reason, row.failure.message, result)
        # The first token of a handoff is vLLM's now, too; it was an output before.
        advanced = [row for row in scheduled if row.failure is None and not row.was_given]
        tokens = [row.sampled for row in advanced]
        step = BegunStep(began_s, {row.sequence: row.num_new for row in advanced}, result, lambda: tokens)
        self._outputs.process(step)
        self._settle(result)
        for row in self._rows.lost(ended):
            self._outputs.fail(row.sequence, "INTERNAL", "vLLM ended the request", result)
        result.duration_s = self._clock() - began_s
        self._pending.put(result if earlier is None else _merged(earlier, result))
        self._meter.end(began_s + result.duration_s, more=self.has_work())

    def _settle(self, result: StepResult) -> None:
        """Waits for the grammars: vLLM computes all of its rows in the next step."""
        deadline_s = time.monotonic() + MASK_WAIT_S
        while self._awaiting:
            sequence, then = self._awaiting.popitem()
            with suppress(BaseException):  # the sequence fails by it below
                if sequence.matcher is not None:
                    sequence.matcher.wait(max(0.0, deadline_s - time.monotonic()))
            self._outputs.follow(sequence, then, result)

    def _start(self, row: VllmRow, result: StepResult) -> None:
        """Notes where a scheduled sequence stands, before its tokens are applied."""
        sequence = row.sequence
        sequence.status = SequenceStatus.RUNNING
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = 0 if row.reserved else sequence.num_computed
            result.started[sequence.request_id] = sequence.cached_tokens
        if sequence.request.prefill_only:
            sequence.block_ids = self._vllm.block_table(row.vllm_id)

    def _check(self, request: EngineRequest) -> None:
        self._require_no_step()
        if request.request_id in self._rows or self._pending.holds(request.request_id):
            raise InvalidArgumentError(
                f"request {request.request_id} is in progress here",
                reason="DUPLICATE_REQUEST",
                field="request_id",
            )
        self._limits.check(request)

    def _enter(self, request: EngineRequest, *, awaits_kv: bool) -> VllmRow:
        row = self._rows.add(request, awaits_kv=awaits_kv)
        if request.deadline_s != float("inf"):
            self._deadlines.push(request.deadline_s, row.sequence)
        self._changed = True
        return row

    def _end(self, sequence: Sequence) -> None:
        """Removes a live sequence everywhere; its blocks are freed unless they must be held."""
        self._deadlines.discard(sequence)
        sequence.close_matcher()
        self._rows.end(sequence)
        self._changed = True

    def _end_if_live(self, sequence: Sequence) -> None:
        row = self._rows.find(sequence.request_id)
        if row is not None and row.sequence is sequence:
            self._end(sequence)

    def _require_no_step(self) -> None:
        if self._begun:
            raise BrokenInvariantError("a step is under way")


def _merged(earlier: StepResult, later: StepResult) -> StepResult:
    """Two steps' results as one; the duration is the later step's."""
    return StepResult(
        earlier.outputs + later.outputs,
        earlier.progress + later.progress,
        earlier.started | later.started,
        earlier.scheduled_tokens + later.scheduled_tokens,
        later.duration_s,
    )
