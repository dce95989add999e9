"""The state of one request across its attempts, and the estimates for new requests: output length, and the cached part
of a prompt. Admission writes how the request waited, `coordinator.request_events` what happens afterwards.
"""

from __future__ import annotations

import enum
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from coordinator.request.inference_request import InferenceRequest, PriorityClass
from coordinator.workers.load import Flight
from coordinator.workers.prefix_index import PrefixHits
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import SplitserveError
from splitserve.generation.bounds import MAX_TTFT_MS
from splitserve.generation.output_delta import TokenDelta
from splitserve.roles import PoolName
from splitserve.tracing.context import TraceContext
from splitserve.v1 import decode_pb2, generation_pb2, inference_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class PairCost:
    """The terms of a pair's predicted cost. Times in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    others_s: float = 0.0
    """Delay that computing the prompt causes to requests behind it; not part of this request's own time."""
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    cached_tokens: int = 0
    """Leading prompt tokens expected in the prefill worker's cache."""
    decode_cached_tokens: int = 0
    """Leading prompt tokens expected in the decode worker's cache."""

    @property
    def wait_s(self) -> float:
        """Seconds until the request can be decoded."""
        return self.queue_s + self.prefill_s + self.transfer_s + self.decode_wait_s


NO_COST = PairCost()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that was considered in its pool, with the cost of its pair with the chosen worker of the other pool."""

    worker_id: str
    pool: PoolName
    cost: PairCost
    is_home: bool = False
    """Whether it is the home of the request's session, which is preferred a little."""


LONGEST_NAME = 100
"""Leading characters of the client's request id that an attempt id contains."""
MAX_PAST_ATTEMPTS = 8
"""Most ended attempts that are remembered: the first ones, and the latest."""


@dataclass(frozen=True, slots=True)
class RequestEstimate:
    """Estimates made when a request arrives; see `coordinator.request.state`."""

    output_tokens: float
    """Expected output length, at most the request's `max_tokens`."""
    uncached_tokens: float
    """Prompt tokens that a prefill worker will have to compute."""
    hits: PrefixHits | None = None
    """Cached prefixes by worker; None without a prefix index."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a request waited for admission, by the pool that lacked capacity."""

    prefill_s: float = 0.0
    decode_s: float = 0.0


NO_WAITS = Waits()


@dataclass(slots=True)
class AttemptReport:
    """Measurements of one attempt, times in milliseconds. `decode_worker` is empty until that worker has sent output,
    `transport` until KV was transferred."""

    prefill_worker: str
    decode_worker: str = ""
    transport: str = ""
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_admit_ms: float = 0.0
    transfer_bytes: int = 0
    cached_prompt_tokens: int = 0
    decode_cached_tokens: int = 0
    worker_queue_ms: float = 0.0
    """Part of `queue_ms` that was spent on the worker that computed the prompt."""
    chunks: int = 0
    """Steps in which the prefill worker computed the prompt; 0: unknown."""
    reserved_blocks: int = 0
    """KV blocks that the ticket names."""
    descriptors: int = 0
    """Write descriptors posted."""

    def record_prefill(self, first: prefill_pb2.FirstToken) -> None:
        """Records the measurements of a prompt that the prefill worker has computed."""
        self.queue_ms += first.queue_ms
        self.worker_queue_ms = first.queue_ms
        self.prefill_ms = first.compute_ms
        self.cached_prompt_tokens = first.cached_tokens
        self.chunks = first.chunks

    def record_local_prefill(self, local: decode_pb2.LocalPrefill) -> None:
        """Records the measurements of a prompt that the decode worker has computed."""
        self.queue_ms += local.queue_ms
        self.worker_queue_ms = local.queue_ms
        self.prefill_ms = local.compute_ms
        self.cached_prompt_tokens = self.decode_cached_tokens = local.cached_tokens

    def record_transfer(self, handoff: prefill_pb2.HandoffDone, transport: str) -> None:
        """Records the measurements of a finished handoff."""
        if handoff.written_bytes:
            self.transport = transport
        self.transfer_ms = handoff.transfer_ms
        self.transfer_bytes = handoff.written_bytes
        self.descriptors = handoff.descriptors


@dataclass(slots=True)
class AttemptRecord:
    """One attempt: the chosen workers, and what was measured."""

    attempt_id: str
    """Globally unique, because two clients may choose the same request id."""
    prefill: Worker
    decode: Worker | None
    """Snapshots from when the pair was chosen; no decode worker if the first token is the last."""
    expected_cached_tokens: int
    """Leading prompt tokens expected in the prefill worker's cache."""
    began_s: float
    """On the coordinator's monotonic clock."""
    suspect: WorkerKey
    """The worker at fault if the attempt fails now."""
    report: AttemptReport
    first_position: int = 0
    """Output tokens of earlier attempts."""
    number: int = 1
    """Its number among the request's attempts, from 1."""
    candidates: tuple[Candidate, ...] = ()
    """If records are kept: of each pool the chosen worker, then the next best ones."""
    trace: TraceContext | None = None
    """The parent of its workers' spans."""
    is_local: bool = False
    """Whether the decode worker computes the prompt itself."""
    reserving_s: float | None = None
    """When Reserve was called. This and the next times are on the coordinator's monotonic clock; None: not yet."""
    prefilling_s: float | None = None
    """When the prompt was sent to the prefill worker."""
    prefilled_s: float | None = None
    """When the prompt was known to be computed."""
    decode_began_s: float | None = None
    """When the decode worker's first step was known."""
    ended_s: float | None = None
    failure: str = ""
    """Reason and message of the error that ended it; `suspect` is the worker at fault."""

    @property
    def pair(self) -> tuple[WorkerKey, ...]:
        """Keys of the prefill worker and of the decode worker, if it is another one."""
        if self.decode is None or self.decode.key == self.prefill.key:
            return (self.prefill.key,)
        return self.prefill.key, self.decode.key

    @property
    def all_workers_responded(self) -> bool:
        """Whether all workers have sent output, given that some output has arrived: the first token comes first."""
        return self.decode is None or bool(self.report.decode_worker)

    @property
    def responsive_parts(self) -> list[tuple[WorkerKey, ...]]:
        """Workers that have sent output, and the pair if KV got across. Valid once output has arrived."""
        prefill = [(self.prefill.key,)] if self.report.prefill_worker else []
        decode = [(self.decode.key,)] if self.decode is not None and self.report.decode_worker else []
        return [*prefill, *decode, *([self.pair] if prefill and decode else [])]


GONE = -1
"""`Entry.number` of an entry that is neither queued nor running."""
NOT_HELD = (0.0, 0.0)
"""`Entry.marks` of a request that did not wait."""


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(Flight):
    """Admission's view of a request, from arrival to end. Times are on the monotonic clock."""

    request_id: str
    tenant: str
    weight: float
    """Weight of the tenant."""
    priority_class: PriorityClass
    priority: int
    """Order among the requests of one tenant and class; higher first."""
    needs_decode: bool
    arrived_s: float
    deadline_s: float
    """When the request times out."""
    ttft_slo_s: float | None = None
    """The request is refused if its first token is predicted later than this, in seconds. None: it is served late."""
    resumed: bool = False
    """It continues a stream that broke at another coordinator: its client already has a part of the answer."""
    number: int = 0
    """Arrival number; below 0 once the request is over."""
    bypassed: int = 0
    """How many later requests bypassed this one because it did not fit."""
    predicted_ttft_s: float = 0.0
    """Forecast at arrival; 0 without one."""
    start_by_s: float = float("inf")
    """When it is refused if it is still queued."""
    started: bool = False
    """Whether it was admitted."""
    from_zero: bool = False
    """Whether it arrived while a pool had no worker, and waits for the first ones."""
    marks: tuple[float, float] = NOT_HELD
    """While queued: total seconds that the queue had waited for prefill and for decode at arrival. Once admitted:
    seconds that this request waited for each."""

    @property
    def order(self) -> tuple[bool, int, float, int]:
        """Sort key among the requests of its tenant and class: resumed streams first, then by priority, then by the
        deadline of the first token, or by arrival without one."""
        by_s = self.due_s if self.due_s < float("inf") else self.arrived_s
        return not self.resumed, -self.priority, by_s, self.number

    @property
    def waits(self) -> bool:
        """Whether it is still to be admitted."""
        return not self.started and self.number != GONE

    def outranks(self, other: Entry) -> bool:
        """Whether it is served before another request of its tenant and class that arrived earlier."""
        return self.order[:-1] < other.order[:-1]


@dataclass(slots=True)
class RequestState:
    """One request. Its output grows only by `append`, which accepts neither gaps nor duplicates."""

    request: InferenceRequest
    estimate: RequestEstimate
    """Made once, at arrival."""
    flight: Entry = field(init=False)
    """The request in the account of work and in admission."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    attempts: int = 0
    fruitless_attempts: int = 0
    """Failed attempts without a token since the last attempt with one."""
    failed_workers: set[WorkerKey] = field(default_factory=set)
    other_role: Worker | None = None
    """The worker that refused the last attempt because its role has changed, as it was when it was chosen."""
    first_token_s: float | None = None
    last_token_s: float = 0.0
    report: AttemptReport = field(default_factory=lambda: AttemptReport(""))
    """Merged over all attempts by `end_attempt`."""
    waits: Waits = NO_WAITS
    awaits_workers: bool = False
    """Whether it waits, or waited when it ended, for the first workers of a pool."""
    from_zero: bool = False
    """Whether it has waited for the first workers of a pool."""
    relieves_prefill: bool = False
    """Whether the decode worker may compute the prompt only because prompts wait at the prefill worker."""
    current: AttemptRecord | None = None
    """The running or last attempt; None before the first."""
    past: list[AttemptRecord] = field(default_factory=list)
    """The ended attempts, at most MAX_PAST_ATTEMPTS of them."""
    tokenized_s: float = 0.0
    """When its prompt was tokenized, on the coordinator's monotonic clock."""
    admitted_s: float | None = None
    """When admission was over."""
    predicted_ttft_s: float = 0.0
    """Admission's forecast for a request that had to wait; 0: none."""
    longest_gap_s: float = 0.0
    """Longest time between two deltas."""
    longest_gap_position: int = 0
    """Position of the token after the longest gap."""
    completed: bool = False
    """Whether the whole answer was sent."""

    def __post_init__(self) -> None:
        request, resumed, targets = self.request, len(self.request.resumed), self.request.targets
        ttft_s = targets.ttft_s
        self.flight = Entry(
            request_id=request.request_id,
            tenant=request.caller.tenant,
            weight=request.caller.weight,
            priority_class=request.caller.priority_class,
            priority=request.priority,
            prompt_tokens=len(request.prompt) + resumed,
            uncached_tokens=self.estimate.uncached_tokens + resumed,
            expected_output=max(1.0, self.estimate.output_tokens - resumed),
            max_output=request.max_tokens - resumed,
            tpot_slo_s=targets.tpot_s,
            due_s=request.received_s + ttft_s if ttft_s is not None else float("inf"),
            needs_decode=request.max_tokens - resumed > 1,
            arrived_s=self.tokenized_s,
            deadline_s=request.deadline_s,
            ttft_slo_s=request.slo_ttft_s,
            resumed=resumed > 0,
        )

    @property
    def attempt(self) -> AttemptRecord:
        """The running or last attempt. Raises AssertionError before the first."""
        assert self.current is not None, "no attempt has begun"
        return self.current

    @property
    def finished(self) -> bool:
        """Whether the last token has been sent."""
        return self.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def context_tokens(self) -> int:
        """Tokens that the next attempt computes or finds cached: the prompt, and the output so far."""
        return len(self.request.prompt) + len(self.token_ids)

    @property
    def needs_decode(self) -> bool:
        """Whether more tokens may follow the one that the prefill worker samples."""
        return self.request.max_tokens - len(self.token_ids) > 1

    @classmethod
    def of(cls, request: InferenceRequest, estimate: RequestEstimate, now: float) -> RequestState:
        """A request at its beginning, or at the point where another coordinator stopped. It was tokenized at `now`."""
        state = cls(request, estimate, list(request.resumed), request.resumed_finish, tokenized_s=now)
        if not state.finished and len(request.resumed) >= request.max_tokens:
            state.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        return state

    @property
    def sent_tokens(self) -> int:
        """Output tokens that this coordinator has sent."""
        return len(self.token_ids) - len(self.request.resumed)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, in seconds; 0 with fewer than two sent tokens."""
        count = self.sent_tokens
        if count < 2 or self.first_token_s is None:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (count - 1)

    def append(self, delta: TokenDelta, now: float) -> None:
        """Appends the next delta. Raises SplitserveError (OUTPUT_GAP) unless it follows the previous one."""
        expected, first, token_ids = len(self.token_ids), delta.first_position, delta.token_ids
        if first != expected and (token_ids or first > expected):
            message = f"worker sent output from position {first}, {expected} is next"
            raise SplitserveError(message, reason="OUTPUT_GAP")
        if token_ids:
            self.token_ids.extend(token_ids)
            if self.first_token_s is None:
                self.first_token_s = now
            elif now - self.last_token_s > self.longest_gap_s:
                self.longest_gap_s, self.longest_gap_position = now - self.last_token_s, expected
            self.last_token_s = now
        self.finish_reason = delta.finish_reason

    def begin_attempt(
        self,
        prefill: Worker,
        decode: Worker | None,
        cached_tokens: int,
        now: float,
        candidates: tuple[Candidate, ...] = (),
    ) -> None:
        """Begins an attempt on these workers; `cached_tokens` of the prompt are expected in prefill's cache."""
        self.attempts += 1
        name = f"{self.request.request_id[:LONGEST_NAME]}.{self.attempts}.{secrets.token_hex(6)}"
        report, trace = AttemptReport(prefill.worker_id), self.request.trace
        self.current = AttemptRecord(
            attempt_id=name,
            prefill=prefill,
            decode=decode,
            expected_cached_tokens=cached_tokens,
            began_s=now,
            suspect=prefill.key,
            report=report,
            first_position=len(self.token_ids),
            number=self.attempts,
            candidates=candidates,
            trace=trace.attempt() if trace is not None else None,
        )

    def end_attempt(self, now: float) -> None:
        """Merges the ended attempt's report. Phases up to the first token stay those of the attempt that sent it."""
        self.attempt.ended_s = now
        if len(self.past) == MAX_PAST_ATTEMPTS:
            del self.past[MAX_PAST_ATTEMPTS // 2]
        self.past.append(self.attempt)
        total, attempt = self.report, self.attempt.report
        if total.prefill_ms == 0.0:
            total.queue_ms, total.reserve_ms = attempt.queue_ms, attempt.reserve_ms
            total.prefill_ms = attempt.prefill_ms
            total.cached_prompt_tokens = min(attempt.cached_prompt_tokens, len(self.request.prompt))
            total.decode_cached_tokens = min(attempt.decode_cached_tokens, len(self.request.prompt))
        total.transfer_ms = attempt.transfer_ms
        total.decode_admit_ms = attempt.decode_admit_ms
        total.transfer_bytes += attempt.transfer_bytes
        total.prefill_worker = attempt.prefill_worker
        total.decode_worker = attempt.decode_worker or total.decode_worker
        total.transport = attempt.transport or total.transport

    def targets_left(self, now: float) -> generation_pb2.ServiceTargets | None:
        """The targets for the next attempt, at `now` on the request's clock; None without any.

        The time to the first token counts from the request's receipt. For a resumed answer it counts from now, so that
        it does not precede the requests of others: any client may claim to resume an answer.
        """
        targets, received_s = self.request.targets, self.request.received_s
        if targets.ttft_s is None and targets.tpot_s is None:
            return None
        left = generation_pb2.ServiceTargets(tpot_ms=(targets.tpot_s or 0.0) * 1e3)
        if targets.ttft_s is not None:
            due_s = (now if self.token_ids else received_s) + targets.ttft_s
            left.ttft_ms = targets.ttft_s * 1e3
            left.ttft_left_ms = max((due_s - now) * 1e3, -MAX_TTFT_MS)
        return left

    def started(self) -> inference_pb2.GenerationStart:
        """The message with which a client can resume at another coordinator."""
        request = self.request
        return inference_pb2.GenerationStart(
            request_id=request.request_id,
            seed=request.sampling.seed,
            served_model=request.model.name,
            traceparent="" if request.trace is None else request.trace.context.traceparent,
            prompt_tokens=len(request.prompt),
            prompt_token_ids=request.prompt if request.returns_prompt else (),
        )

    def done(self) -> inference_pb2.GenerationDone:
        """The final message of the stream."""
        report, count = self.report, len(self.token_ids)
        first_s = self.first_token_s if self.first_token_s is not None else self.request.received_s
        return inference_pb2.GenerationDone(
            finish_reason=self.finish_reason,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                completion_tokens=count,
                cached_prompt_tokens=report.cached_prompt_tokens,
                decode_cached_tokens=report.decode_cached_tokens,
            ),
            timings=inference_pb2.PhaseTimings(
                queue_ms=report.queue_ms,
                prefill_ms=report.prefill_ms,
                transfer_ms=report.transfer_ms,
                decode_admit_ms=report.decode_admit_ms,
                ttft_ms=(first_s - self.request.received_s) * 1e3,
                tpot_ms=self.tpot_s * 1e3,
                reserve_ms=report.reserve_ms,
                transfer_bytes=report.transfer_bytes,
            ),
            served_by=inference_pb2.ServedBy(
                prefill_worker=report.prefill_worker,
                decode_worker=report.decode_worker,
                transport=report.transport,
                attempts=self.attempts,
                model=self.request.model.name,
            ),
            request_id=self.request.request_id,
            seed=self.request.sampling.seed,
            model=self.request.public_name or self.request.model.name,
        )


class Stage(enum.StrEnum):
    """What a request in progress is waiting for."""

    ADMITTING = "admitting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"


DEFAULT_OUTPUT_TOKENS = 128.0
"""Expected output length until a request has completed."""
MAX_LENGTH_KEYS = 4096
"""Tenants and sessions whose output lengths are remembered."""
_MEMORY_ANSWERS = 64
"""Window of the learned means, in requests."""

LengthKey = tuple[str, str, str]
"""(model, tenant, session). An empty session stands for all requests of the tenant."""


@dataclass(slots=True)
class LearnedMean:
    """A running mean: arithmetic over the first values, exponential from `_MEMORY_ANSWERS` on."""

    value: float
    seen: int = 0

    def add(self, value: float) -> None:
        """Adds a value."""
        self.seen = min(self.seen + 1, _MEMORY_ANSWERS)
        self.value += (value - self.value) / self.seen


@dataclass(slots=True)
class ModelMeans:
    """Learned means of the requests for one base model and its adapters."""

    output_tokens: LearnedMean = field(default_factory=lambda: LearnedMean(DEFAULT_OUTPUT_TOKENS))
    cached_share: LearnedMean = field(default_factory=lambda: LearnedMean(0.0))
    """Cached share of the prompt, 0..1, as reported by prefill workers."""


class Estimates:
    """Learns from every request. The least recently used sessions and tenants are forgotten first."""

    def __init__(self, registry: Registry, max_length_keys: int = MAX_LENGTH_KEYS) -> None:
        self._registry = registry
        self._max_length_keys = max_length_keys
        self._models: dict[str, ModelMeans] = {}
        self._means: OrderedDict[LengthKey, LearnedMean] = OrderedDict()
        self._prefill_slots = 0
        """Slots of prefill workers in the prefix index, as a bit set."""
        registry.subscribe(self._on_registry_change)

    def of(self, request: InferenceRequest, now: float) -> RequestEstimate:
        """The estimate for a request that arrives now."""
        prompt_tokens = len(request.prompt)
        if request.block_keys and self._prefill_slots:
            hits = self._registry.prefixes.hits(request.block_keys, now)
            # The largest number of leading blocks that any prefill worker holds.
            blocks = next((depth for depth, slots in reversed(hits.levels) if slots & self._prefill_slots), 0)
            # The last prompt token is always computed, for its logits.
            cached = min(blocks * request.model.block_size_tokens, prompt_tokens - 1)
            return RequestEstimate(self._output_tokens(request), float(prompt_tokens - cached), hits)
        uncached = prompt_tokens * (1.0 - self.of_model(request.model.base_name).cached_share.value)
        return RequestEstimate(self._output_tokens(request), uncached)

    def of_model(self, model: str) -> ModelMeans:
        """The learned means of a base model that is known to the registry, its adapters' requests included."""
        means = self._models.get(model)
        if means is None:
            means = self._models[model] = ModelMeans()
        return means

    def learn(self, state: RequestState) -> None:
        """Learns from a request whose whole answer was sent.

        Cached prompt tokens count only as found by a prefill worker in the first attempt: a later attempt finds blocks
        that the first one cached.
        """
        count, means = len(state.token_ids), self.of_model(state.request.model.base_name)
        if state.attempts == 1 and state.report.prefill_worker:
            share = state.report.cached_prompt_tokens / max(1, len(state.request.prompt))
            means.cached_share.add(min(1.0, share))
        means.output_tokens.add(count)
        for key in _length_keys(state.request):
            mean = self._means.get(key)
            if mean is None:
                mean = self._means[key] = LearnedMean(0.0)
            self._means.move_to_end(key)
            mean.add(count)
        while len(self._means) > self._max_length_keys:
            self._means.popitem(last=False)

    def _output_tokens(self, request: InferenceRequest) -> float:
        """The mean of the narrowest known key, at most the request's `max_tokens`."""
        known = next((mean for key in _length_keys(request) if (mean := self._means.get(key))), None)
        mean = known or self.of_model(request.model.base_name).output_tokens
        return min(mean.value, request.max_tokens)

    def _on_registry_change(self, worker: Worker | None) -> None:
        if worker is None:
            self._prefill_slots = 0
        for changed in (worker,) if worker is not None else self._registry.snapshot().workers:
            if changed.computes_prompts and changed.prefix_slot >= 0:
                self._prefill_slots |= 1 << changed.prefix_slot


def _length_keys(request: InferenceRequest) -> tuple[LengthKey, ...]:
    model, tenant = request.model.name, request.caller.tenant
    wide = (model, tenant, "")
    return ((model, tenant, request.session_id), wide) if request.session_id else (wide,)
