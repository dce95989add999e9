"""An engine whose steps vLLM schedules and computes, in processes of its own; text and the handoff are splitserve's."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

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
from engine.core.model_runner import SampledToken
from engine.core.output_processor import BegunStep, OutputProcessor, PendingResult
from engine.core.sequence import Sequence, SequenceStatus
from engine.scheduling.step_times import StepMeter, StepPart
from engine.vllm.boot import StartedVllm
from engine.vllm.connector import HELD_FIELD
from engine.vllm.links import VllmEndedError
from engine.vllm.options import reason_of, step_tokens_of
from engine.vllm.rows import VllmRow, VllmRows
from engine.vllm.sampling import sampled_tokens
from splitserve.config.engine import EngineConfig
from splitserve.errors import (
    BrokenInvariantError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from splitserve.generation.kv_blocks import blocks_for, extend_block_hashes
from splitserve.models.tokenizer import Tokenizer
from splitserve.queues import LazyHeap
from splitserve.v1 import vllm_pb2 as pb

SCHEDULED = 2
"""vLLM's `EngineCoreEventType.SCHEDULED`."""
SILENT_TIMES = 10.0
"""vLLM may say nothing for so many times `hung_step_s` while requests run."""


class VllmEngine(Engine):
    """Hands requests to vLLM, and takes what it computes: a step here is one message of vLLM's, however many steps of
    vLLM's passed before it."""

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
        self.kv_events = vllm.events.log
        memory = vllm.transport.endpoint.memory
        self._block_size = memory.layout.block_size_tokens
        self._prompt_room = 0
        """Blocks that reservations leave for a prompt."""
        self._total_blocks = memory.num_blocks
        # vLLM starts only where its pool holds one request of its longest context.
        context = vllm.facts.context_tokens
        self._limits = RequestLimits.of(vllm.facts, config.context_tokens, context)
        self._silent_s = SILENT_TIMES * config.hung_step_s
        self._heard_s = clock()
        self._rows = VllmRows(vllm, config.max_bypasses)
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._meter = StepMeter()
        self.step_totals = self._meter.totals
        self._messages: list[Any] = []
        """vLLM's messages that have not been taken in."""
        self._awaiting = False
        """What the ranks know of whether peers may be writing."""
        self._pending = PendingResult(tokenizer, self._end_if_live, late=False)
        self._outputs = OutputProcessor(
            self._block_size,
            lambda sequence: None,
            self._limits,
            self._pending,
            self._end,
            lambda sequence, then: None,  # no sequence has a grammar here
        )
        vllm.transport.on_scheduler = self._on_scheduler

    def start(self, post: Callable[[Callable[[Engine], object]], None]) -> None:
        """Takes vLLM's messages from now on. `post` runs a function on the engine thread."""
        self._vllm.listen(
            lambda message: post(lambda core: self._messages.append(message)), lambda: post(lambda core: None)
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
        return self._rows.release_held(request_id)

    @override
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """vLLM gives blocks in a step of its own: None until it has, and its slot is taken from the first call on."""
        row = self._rows.find(request.request_id)
        if row is not None and row.request is request and row.sequence.status is SequenceStatus.WAITING:
            if row.reserved is not None:
                self._rows.grant(row, reservation)
                self._say_awaiting()
            return row.reserved
        self._check(request)
        if request.prefill_only:
            raise BrokenInvariantError("a reservation is for decoding")
        if self._rows.knows_reservation(reservation):
            raise BrokenInvariantError(f"reservation {reservation} is in use")
        if self._has_room(request):
            self._enter(request, awaits_kv=True)
        return None

    @override
    def keep_prompt_room(self, keeps: bool) -> None:
        longest = blocks_for(self._limits.sequence_tokens, self._block_size)
        self._prompt_room = max(1, min(longest, self._total_blocks // 2)) if keeps else 0

    @override
    def cached_tokens(self, request: EngineRequest) -> int:
        hashes: list[bytes] = []
        whole = (len(request.token_ids) - 1) // self._block_size
        extend_block_hashes(hashes, request.token_ids, self._block_size, request.cache_salt, whole)
        return self._vllm.events.cached_blocks(hashes) * self._block_size

    @override
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """vLLM computes the prompt's last position once more, and chooses the first token there."""
        self._limits.check_first_token(first_token_id)
        row = self._rows.admit(reservation, first_token_id)
        if row is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        sequence = row.sequence
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed = len(sequence.tokens)
        self._heard_s = self._clock()
        return self._outputs.append_given(sequence, first_token_id)

    @override
    def release_writer(self, reservation: int) -> bool:
        released = self._rows.release_writer(reservation)
        self._say_awaiting()
        return released

    @override
    def has_work(self) -> bool:
        return bool(self._messages) or self.next_deadline() <= self._clock()

    @override
    def next_deadline(self) -> float:
        first = self._deadlines.peek()
        due_s = float("inf") if first is None else first[0]
        return min(due_s, self._heard_s + self._silent_s) if self._runs() else due_s

    @override
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """Computed elsewhere."""

    @override
    def finish_step(self) -> None:
        """Takes in what vLLM has said. Raises BrokenInvariantError if it has said nothing for too long."""
        now, result = self._clock(), self._pending.take() or StepResult()
        messages, self._messages = self._messages, []
        if messages:
            self._heard_s = now
        elif self._runs() and now >= self._heard_s + self._silent_s:
            raise BrokenInvariantError(f"vLLM has said nothing for {self._silent_s:.0f} s")
        self._outputs.expire(self._deadlines, now, result)
        for message in messages:
            if isinstance(message, Exception):
                raise VllmEndedError(f"vLLM has ended: {reason_of(message)}") from message
            self._take(message, result)
        for row, error in self._rows.give_parked() if self._rows.has_parked else ():
            self._outputs.fail(row.sequence, error.reason, error.message, result)
        self._pending.put(result)

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
        decoding = sum(sequence.status is SequenceStatus.RUNNING for sequence in sequences)
        # A prompt that vLLM computes is waiting here until its first token has come.
        begun = min(len(waiting), max(0, self._vllm.running_requests() - decoding))
        used = round(self._vllm.used_share() * self._total_blocks)
        reserved, quarantined = self._rows.reserved_blocks()
        return EngineLoad(
            waiting_requests=len(waiting) - begun,
            running_requests=decoding + begun,
            waiting_tokens=sum(sequence.remaining for sequence in waiting),
            total_blocks=self._total_blocks,
            free_blocks=max(0, self._total_blocks - max(used, reserved + quarantined)),
            reserved_blocks=reserved,
            quarantined_blocks=quarantined,
            referenced_blocks=max(0, used - reserved - quarantined),
            latency=self._meter.latency.model,
        )

    @override
    def close(self) -> None:
        self._vllm.close()

    def _has_room(self, request: EngineRequest) -> bool:
        """Whether a reservation may be given to vLLM.

        Only blocks of reservations can be kept for ever by two workers that wait for each other: what runs ends, and
        vLLM takes blocks from what runs. So the room for prompts is counted from the reservations alone.
        """
        # 1. vLLM counts no slot for a request that waits for KV, but needs one to admit it. A prompt takes one later.
        taken = [
            row for row in self._rows.live if row.awaits_kv or row.sequence.status is SequenceStatus.RUNNING
        ]
        reserved = [row.request for row in taken if row.awaits_kv and not row.received]
        if len(taken) >= self._max_running - (1 if self._prompt_room and reserved else 0):
            return False
        # 2. Without prompts here, or beside no other reservation, it may have all blocks.
        if not self._prompt_room or not reserved:
            return True
        # 3. It leaves the room for prompts.
        blocks = sum(blocks_for(len(waiting.token_ids), self._block_size) for waiting in (*reserved, request))
        return blocks + self._prompt_room <= self._total_blocks

    def _runs(self) -> bool:
        return any(row.sequence.status is SequenceStatus.RUNNING for row in self._rows.live)

    def _on_scheduler(self, event: pb.VllmEvent) -> None:
        if event.WhichOneof("kind") == "allocated":
            self._rows.allocated(event.allocated)
        else:
            self._rows.ended(event.ended)

    def _take(self, message: Any, result: StepResult) -> None:
        """Applies a message of vLLM's: the tokens of one of its steps."""
        advanced: dict[Sequence, list[SampledToken]] = {}
        parts: list[StepPart] = []
        began_s = float("inf")
        for output in message.outputs:
            row = self._rows.at_vllm(output.request_id)
            if row is None:
                continue
            if (held := (output.kv_transfer_params or {}).get(HELD_FIELD)) is not None and not row.over:
                row.held = tuple(map(tuple, held))
                row.sequence.block_ids = list(chain(*held))
            if row.over:
                continue
            began_s = min(began_s, self._start(row, output, parts, result))
            tokens = sampled_tokens(output)
            if tokens and row.given is not None:
                # The first token of a handoff is vLLM's now, too; it was an output before.
                row.given = None
                del tokens[0]
            advanced[row.sequence] = tokens
        self._measure(parts, began_s, message.timestamp, result)
        self._advance(advanced, result)
        for output in message.outputs:
            if not output.finished:
                continue
            row = self._rows.at_vllm(output.request_id)
            if row is not None and not row.over:
                self._outputs.fail(row.sequence, "INTERNAL", "vLLM ended the request", result)

    def _start(self, row: VllmRow, output: Any, parts: list[StepPart], result: StepResult) -> float:
        """Notes what a step has computed of a sequence; returns when vLLM began with it, infinity if it had begun."""
        sequence, began_s = row.sequence, float("inf")
        context, new = len(sequence.tokens) - 1, 1
        sequence.status = SequenceStatus.RUNNING
        if not sequence.started:
            sequence.started = True
            began_s = min(
                (event.timestamp for event in output.events or () if event.type == SCHEDULED), default=began_s
            )
            stats = output.prefill_stats
            if not row.awaits_kv:
                sequence.cached_tokens = stats.num_cached_tokens if stats is not None else 0
                context, new = sequence.cached_tokens, len(sequence.tokens) - sequence.cached_tokens
            result.started[sequence.request_id] = sequence.cached_tokens
        parts.append(StepPart(context, new))
        return began_s

    def _measure(self, parts: list[StepPart], began_s: float, ended_s: float, result: StepResult) -> None:
        result.scheduled_tokens += sum(part.new_tokens for part in parts)
        if began_s < ended_s:
            result.duration_s = max(result.duration_s, self._clock() - began_s)
        self._meter.begin(min(began_s, ended_s))
        # The first decode steps after a pause began nobody knows when.
        self._meter.expect(parts if began_s < ended_s or self._meter.busy else ())
        self._meter.end(ended_s, more=bool(parts))

    def _advance(self, advanced: dict[Sequence, list[SampledToken]], result: StepResult) -> None:
        """Applies tokens, of each sequence the first one, then the second ones of speculation, and so on."""
        for wave in zip_longest(*advanced.values()):
            alive = {
                sequence: token
                for sequence, token in zip(advanced, wave, strict=True)
                if token is not None and sequence.status is SequenceStatus.RUNNING
            }
            new = {sequence: sequence.remaining for sequence in alive}
            step = BegunStep(0.0, new, result, lambda alive=alive: list(alive.values()))  # type: ignore[misc]
            self._outputs.process(step)
        for progress in result.progress:
            row = self._rows.find_held(progress.request_id)
            if row is not None and row.held is not None:
                progress.block_ids = row.sequence.block_ids
                progress.group_blocks = tuple(map(len, row.held))

    def _check(self, request: EngineRequest) -> None:
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
        return row

    def _end(self, sequence: Sequence) -> None:
        """Removes a live sequence everywhere; its blocks are freed unless they must be held."""
        self._deadlines.discard(sequence)
        self._rows.end(sequence)

    def _end_if_live(self, sequence: Sequence) -> None:
        row = self._rows.find(sequence.request_id)
        if row is not None and row.sequence is sequence:
            self._end(sequence)

    def _say_awaiting(self) -> None:
        """Ranks look for notifications all the time while peers may be writing."""
        awaiting = self._rows.may_be_written
        if awaiting != self._awaiting:
            self._awaiting = awaiting
            self._vllm.processes.command(pb.VllmCommand(awaiting=awaiting))
