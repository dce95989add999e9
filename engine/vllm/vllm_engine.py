"""The engine of `--engine vllm`: vLLM schedules and computes in processes of its own.

The text of the answers and the handoff are splitserve's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from typing_extensions import override
from vllm.v1.engine import EngineCoreEventType

from engine.core.engine import (
    Engine,
    EngineLoad,
    EngineRequest,
    FinishReason,
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
from engine.vllm.options import reason_of
from engine.vllm.requests import VllmRequest, VllmRequests
from engine.vllm.sampling import put_prompt_logprobs, sampled_tokens
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

SILENT_TIMES = 10.0
"""While requests run, vLLM must send a message within this many times `EngineConfig.hung_step_s`."""
MAX_SPREAD_S = 0.25
"""The tokens of one step are put out within this time."""

_Wave: TypeAlias = dict[Sequence, SampledToken | None]
"""Tokens of a step, at most one of each sequence. None: vLLM has ended the request."""


class VllmEngine(Engine):
    """Gives requests to vLLM, and applies the tokens of its messages.

    `finish_step` applies all messages that have arrived. vLLM sends one for each of its steps that has outputs.
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
        self.max_step_tokens = vllm.engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._max_running = min(config.max_running_requests, self.max_step_tokens)
        self.kv_events = vllm.events.log
        memory = vllm.transport.endpoint.memory
        self._block_size = memory.layout.block_size_tokens
        self._prompt_room = 0
        """Blocks that reservations leave for a prompt."""
        self._total_blocks = memory.num_blocks
        # vLLM refuses to start with a pool that cannot hold one request of the longest context.
        self._limits = RequestLimits.of(vllm.facts, config.context_tokens, vllm.facts.context_tokens)
        self._silent_s = SILENT_TIMES * config.hung_step_s
        self._heard_s = clock()
        """When vLLM last sent a message, or was last given KV to go on with."""
        self._requests = VllmRequests(vllm, config.max_bypasses)
        self._token_spread = config.token_spread
        self._late_tokens: deque[tuple[float, _Wave]] = deque()
        """What vLLM's last message brought and is put out later, each wave with its time."""
        self._message_s = 0.0
        """When vLLM sent its last message."""
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap()
        self._meter = StepMeter()
        self.step_totals = self._meter.totals
        self._messages: list[Any] = []
        """vLLM's `EngineCoreOutputs` that have not been applied. An exception means that vLLM has ended."""
        self._pending = PendingResult(tokenizer, self._end, late=False)
        self._outputs = OutputProcessor(
            self._block_size,
            lambda sequence: None,
            self._limits,
            self._pending,
            self._end,
            lambda sequence, then: None,  # vLLM follows the grammars, so no sequence has one
        )
        vllm.transport.on_scheduler = self._requests.on_scheduler

    def start(self, post: Callable[[Callable[[Engine], object]], None]) -> None:
        """Starts to take vLLM's messages. `post`, called on any thread, runs a function on the engine thread."""
        self._vllm.listen(
            lambda message: post(lambda core: self._messages.append(message)), lambda: post(lambda core: None)
        )

    @override
    def add_request(self, request: EngineRequest) -> None:
        self._check(request)
        waiting = [s for s in self._live_sequences() if s.status is SequenceStatus.WAITING]
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
        entry = self._requests.live.get(request_id)
        if entry is not None:
            self._end(entry.sequence)
        return dropped or entry is not None

    @override
    def release_held(self, request_id: str) -> bool:
        if request_id in self._requests.live:
            raise BrokenInvariantError(f"{request_id} has not ended")
        return self._requests.release_held(request_id)

    @override
    def reserve(self, request: EngineRequest, reservation: int) -> ReservedBlocks | None:
        """Returns None until vLLM has allocated blocks, in a step of its own.

        From the first call that finds a running slot on, the request takes this slot.
        """
        entry = self._requests.live.get(request.request_id)
        if entry is not None and entry.request is request and entry.sequence.status is SequenceStatus.WAITING:
            if entry.reserved is not None:
                self._requests.grant(entry, reservation)
            return entry.reserved
        self._check(request)
        if request.prefill_only:
            raise BrokenInvariantError("a reservation is for decoding")
        if reservation in self._requests.writers or self._requests.waiting(reservation) is not None:
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
        if request.scores_prompt:
            return 0
        hashes: list[bytes] = []
        full_blocks = (len(request.token_ids) - 1) // self._block_size
        extend_block_hashes(hashes, request.token_ids, self._block_size, request.cache_salt, full_blocks)
        return self._vllm.events.cached_blocks(hashes) * self._block_size

    @override
    def admit(self, reservation: int, first_token_id: int) -> RequestOutput | None:
        """vLLM computes the prompt's last position again, and chooses the first token there."""
        self._limits.check_first_token(first_token_id)
        sequence = self._requests.admit(reservation, first_token_id)
        if sequence is None:
            raise NotFoundError(f"reservation {reservation} is not live", reason="RESERVATION_NOT_LIVE")
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed = len(sequence.tokens)
        self._heard_s = self._clock()
        return self._outputs.append_given(sequence, first_token_id)

    @override
    def release_writer(self, reservation: int) -> bool:
        return self._requests.release_writer(reservation)

    @override
    def has_work(self) -> bool:
        return bool(self._messages) or self.next_deadline() <= self._clock()

    @override
    def next_deadline(self) -> float:
        first = self._deadlines.peek()
        due_s = float("inf") if first is None else first[0]
        if self._late_tokens:
            due_s = min(due_s, self._late_tokens[0][0])
        return min(due_s, self._heard_s + self._silent_s) if self._runs() else due_s

    @override
    def begin_step(self, computing: Callable[[float | None], None] = lambda expected_s: None) -> None:
        """Does nothing: vLLM begins its steps by itself."""

    @override
    def finish_step(self) -> None:
        """Applies vLLM's messages. Raises VllmEndedError if vLLM has ended, BrokenInvariantError if it is silent."""
        now, result = self._clock(), self._pending.take() or StepResult()
        messages, self._messages = self._messages, []
        if messages:
            self._heard_s = now
        elif self._runs() and now >= self._heard_s + self._silent_s:
            raise BrokenInvariantError(f"vLLM has sent nothing for {self._silent_s:.0f} s")
        self._outputs.expire(self._deadlines, now, result)
        for message in messages:
            if isinstance(message, Exception):
                raise VllmEndedError(f"vLLM has ended: {reason_of(message)}") from message
            self._apply(message, result)
        self._put_out_late(now, result)
        for sequence, error in self._requests.give_parked():
            self._outputs.fail(sequence, error.reason, error.message, result)
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
        sequences, stats = self._live_sequences(), self._vllm.stats
        waiting = [sequence for sequence in sequences if sequence.status is SequenceStatus.WAITING]
        decoding = sum(sequence.status is SequenceStatus.RUNNING for sequence in sequences)
        # A prompt that vLLM is computing has the status WAITING until its first token has come.
        computing = 0 if stats is None else min(len(waiting), max(0, stats.num_running_reqs - decoding))
        used = 0 if stats is None else round(stats.kv_cache_usage * self._total_blocks)
        reserved, quarantined = self._requests.reserved_blocks()
        return EngineLoad(
            waiting_requests=len(waiting) - computing,
            running_requests=decoding + computing,
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
            entry
            for entry in self._requests.live.values()
            if entry.awaits_kv or entry.sequence.status is SequenceStatus.RUNNING
        ]
        reserved = [entry.request for entry in taken if entry.sequence.status is not SequenceStatus.RUNNING]
        if len(taken) >= self._max_running - (1 if self._prompt_room and reserved else 0):
            return False
        # 2. Without prompts here, or beside no other reservation, it may have all blocks.
        if not self._prompt_room or not reserved:
            return True
        # 3. It leaves the room for prompts.
        blocks = sum(blocks_for(len(waiting.token_ids), self._block_size) for waiting in (*reserved, request))
        return blocks + self._prompt_room <= self._total_blocks

    def _live_sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._requests.live.values()]

    def _runs(self) -> bool:
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self._live_sequences())

    def _apply(self, message: Any, result: StepResult) -> None:
        """Applies one of vLLM's `EngineCoreOutputs`: the tokens of one step."""
        self._put_out_late(float("inf"), result)
        waves: list[_Wave] = []
        parts: list[StepPart] = []
        began_s = float("inf")
        for output in message.outputs:
            entry = self._requests.at_vllm.get(output.request_id)
            if entry is None or entry.ended:
                continue
            entry.held = (output.kv_transfer_params or {}).get(HELD_FIELD)
            if not entry.sequence.started:
                times = [e.timestamp for e in output.events or () if e.type == EngineCoreEventType.SCHEDULED]
                began_s = min([began_s, *times])
            parts.append(self._part(entry, output, result))
            if output.pooling_output is not None:
                self._put_out_pooled(entry, output.pooling_output, result)
                continue
            if (prompt := entry.sequence.prompt_logprobs) is not None:
                put_prompt_logprobs(output, prompt)
            sampled: list[SampledToken | None] = [*sampled_tokens(output, entry.request.sampling.logprobs)]
            # `admit` has put out the first token of a handoff before vLLM repeats it.
            if sampled and entry.repeated_token is not None:
                entry.repeated_token = None
                del sampled[0]
            if output.finished:
                sampled.append(None)
            # Speculation brings several tokens of a sequence at once.
            for index, token in enumerate(sampled):
                if index == len(waves):
                    waves.append({})
                waves[index][entry.sequence] = token
        self._measure(parts, began_s, message.timestamp, result)
        spread_s = self._token_spread * min(MAX_SPREAD_S, message.timestamp - self._message_s)
        self._message_s, now = message.timestamp, self._clock()
        self._late_tokens.extend((now + spread_s * n / len(waves), wave) for n, wave in enumerate(waves))
        self._put_out_late(now, result)

    def _put_out_pooled(self, entry: VllmRequest, pooled: Any, result: StepResult) -> None:
        """Ends a request with its result, a tensor of one dimension."""
        sequence, entry.ended_at_vllm = entry.sequence, True
        if not pooled.isfinite().all():
            self._outputs.fail(sequence, "INTERNAL", "the model's result is not finite", result)
            return
        self._end(sequence)
        result.add(
            RequestOutput(sequence.request_id, 0, finish_reason=FinishReason.STOP, pooled=pooled.tolist())
        )

    def _part(self, entry: VllmRequest, output: Any, result: StepResult) -> StepPart:
        """Returns what a step computed of a request, and notes that the request has started."""
        sequence = entry.sequence
        num_before = len(sequence.tokens) - 1
        sequence.status = SequenceStatus.RUNNING
        if not sequence.started:
            sequence.started = True
            if not entry.awaits_kv:
                stats = output.prefill_stats
                num_before = sequence.cached_tokens = stats.num_cached_tokens if stats is not None else 0
            result.started[sequence.request_id] = sequence.cached_tokens
        return StepPart(num_before, len(sequence.tokens) - num_before)

    def _measure(self, parts: list[StepPart], began_s: float, ended_s: float, result: StepResult) -> None:
        result.scheduled_tokens += sum(part.new_tokens for part in parts)
        if began_s < ended_s:
            result.duration_s = max(result.duration_s, self._clock() - began_s)
        self._meter.begin(min(began_s, ended_s))
        # vLLM does not say when a step without new requests began. After a pause such a step is not measured.
        self._meter.expect(parts if began_s < ended_s or self._meter.busy else ())
        self._meter.end(ended_s, more=bool(parts))

    def _put_out_late(self, now: float, result: StepResult) -> None:
        """Applies the waves that are due, and drops the tokens of requests that have ended."""
        while self._late_tokens:
            due_s, wave = self._late_tokens[0]
            running = {
                sequence: token
                for sequence, token in wave.items()
                if sequence.status is SequenceStatus.RUNNING
            }
            if running and due_s > now:
                break
            self._late_tokens.popleft()
            sampled = {sequence: token for sequence, token in running.items() if token is not None}
            num_new = {sequence: sequence.remaining for sequence in sampled}
            self._outputs.process(BegunStep(0.0, num_new, result, partial(list, sampled.values())))
            for sequence in running.keys() - sampled:
                self._outputs.fail(sequence, "INTERNAL", "vLLM ended the request", result)
        for progress in result.progress:
            entry = self._requests.held.get(progress.request_id)
            if entry is not None and entry.held is not None:
                progress.block_ids = list(chain(*entry.held))
                progress.group_blocks = tuple(map(len, entry.held))

    def _check(self, request: EngineRequest) -> None:
        name, requests = request.request_id, self._requests
        if name in requests.live or name in requests.held or self._pending.holds(name):
            raise InvalidArgumentError(
                f"request {name} is in progress here",
                reason="DUPLICATE_REQUEST",
                field="request_id",
            )
        self._limits.check(request)

    def _enter(self, request: EngineRequest, *, awaits_kv: bool) -> None:
        sequence = self._requests.add(request, awaits_kv=awaits_kv)
        if request.deadline_s != float("inf"):
            self._deadlines.push(request.deadline_s, sequence)

    def _end(self, sequence: Sequence) -> None:
        self._deadlines.discard(sequence)
        self._requests.end(sequence)
