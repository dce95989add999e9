"""Request statistics: demand at arrival, time by phase, outcomes.

All counts are cumulative, so that readers compute their own windows; `scaling.proto` defines each of them.
`RequestEvents` counts each sample once, as it happens, however the request ends.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from coordinator.admission.queue import NOTHING_HELD, Held
from coordinator.request.state import Stage
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError
from splitserve.histograms import DurationCounts
from splitserve.v1 import scaling_pb2

Outcome: TypeAlias = scaling_pb2.Outcome.ValueType
CachePool = Literal["prefill", "decode"]
"""A prefix cache: the prefill worker's saves computing tokens, the decode worker's saves transferring their KV."""
REFUSALS_KEPT_S = 120.0
"""How long a refusal is remembered: twice the longest retry hint."""
MAX_REFUSALS_KEPT = 65_536
OUTCOMES: tuple[Outcome, ...] = tuple(value for value in scaling_pb2.Outcome.values() if value)


@dataclass(slots=True)
class PhaseCounts:
    """Durations of one phase. Cold samples are counted separately: autoscaling ignores them, but clients saw them."""

    warm: DurationCounts = field(default_factory=DurationCounts)
    cold: DurationCounts = field(default_factory=DurationCounts)

    def add(self, seconds: float, *, cold: bool) -> None:
        """Counts one sample."""
        (self.cold if cold else self.warm).add(seconds)


Phase: TypeAlias = scaling_pb2.Phase.ValueType


@dataclass(slots=True)
class ModelStats:
    """The statistics of one model. `uncached_tokens` and `output_tokens` are estimates made at arrival."""

    requests: int = 0
    prompt_tokens: int = 0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    local_requests: int = 0
    """Requests whose prompt a decode worker computes, and would compute even if no prompt waited at prefill workers."""
    local_tokens: float = 0.0
    """The part of `uncached_tokens` of `local_requests`."""
    phases: Mapping[Phase, PhaseCounts] = field(
        default_factory=lambda: {phase: PhaseCounts() for phase in PHASES}
    )
    short_ttft: PhaseCounts = field(default_factory=PhaseCounts)
    """PHASE_TTFT without PHASE_TTFT_LONG."""
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    in_stage: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    looked_up_tokens: int = 0
    """Prompt tokens of the requests that got a token."""
    hit_tokens: dict[CachePool, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    """The part of `looked_up_tokens` that was not computed, and the part that was not transferred."""
    prefilling_tokens: float = 0.0
    """Uncached prompt tokens of the requests in stage PREFILLING."""
    held: Held = NOTHING_HELD
    """Queued requests, which are in stage ADMITTING, too."""
    without_pair: int = 0
    """Requests that wait for workers outside of the queue."""

    @property
    def stages(self) -> dict[Stage, int]:
        """Requests in progress by what they wait for. Queued requests count for the pool that lacks capacity."""
        held = self.held
        counts = self.in_stage.copy()
        if held.cause == "workers":
            return counts
        counts[Stage.ADMITTING] = max(0, counts[Stage.ADMITTING] - held.requests)
        counts[Stage.PREFILLING if held.cause == "prefill" else Stage.RESERVING] += held.requests
        return counts

    @property
    def backlog_tokens(self) -> float:
        """Uncached prompt tokens that wait for prefill, on workers or in the coordinator's queue."""
        held = self.held
        return self.prefilling_tokens + (held.uncached_tokens if held.cause == "prefill" else 0.0)

    @property
    def waiting_for_workers(self) -> int:
        """Requests that wait for the first workers of a pool."""
        return self.without_pair + (self.held.requests if self.held.cause == "workers" else 0)

    def arrived(self, prompt_tokens: int, uncached_tokens: float, output_tokens: float) -> None:
        """Counts demand. `uncached_tokens` and `output_tokens` are estimates."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.uncached_tokens += uncached_tokens
        self.output_tokens += output_tokens

    def move(self, before: Stage | None, after: Stage | None, uncached_tokens: float) -> None:
        """Moves a request with this estimate from a stage to another one; None: none."""
        if before is not None:
            self.in_stage[before] -= 1
        if after is not None:
            self.in_stage[after] += 1
        prefilling = Stage.PREFILLING
        self.prefilling_tokens += ((after is prefilling) - (before is prefilling)) * uncached_tokens
        if not self.in_stage[prefilling]:
            self.prefilling_tokens = 0.0  # discards accumulated rounding errors


def summed(parts: Sequence[ModelStats]) -> ModelStats:
    """The statistics of a base model and of its adapters, in this order, as one: they share workers and queue."""
    if len(parts) == 1:
        return parts[0]
    total = ModelStats(held=parts[0].held)
    for part in parts:
        total.requests += part.requests
        total.prompt_tokens += part.prompt_tokens
        total.uncached_tokens += part.uncached_tokens
        total.output_tokens += part.output_tokens
        total.local_requests += part.local_requests
        total.local_tokens += part.local_tokens
        total.prefilling_tokens += part.prefilling_tokens
        total.without_pair += part.without_pair
        for phase, counts in part.phases.items():
            total.phases[phase].warm.include(counts.warm)
            total.phases[phase].cold.include(counts.cold)
        total.short_ttft.warm.include(part.short_ttft.warm)
        total.short_ttft.cold.include(part.short_ttft.cold)
        for outcome, count in part.outcomes.items():
            total.outcomes[outcome] += count
        for stage, count in part.in_stage.items():
            total.in_stage[stage] += count
    return total


class RefusedRequests:
    """Recognizes requests that were refused and are sent again, so that demand counts once.

    Each refusal exempts one later request of the same tenant with the same prompt and limits from being counted; other
    clients of this tenant are not told apart. Keeps the refusals of the last `REFUSALS_KEPT_S` seconds, at most
    `MAX_REFUSALS_KEPT` prompts; `now` is on any monotonic clock.

    A `request` is the tuple by which two requests are equal: model, tenant, prompt and limits.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """By fingerprint: the number of unused refusals, and the time of the last one; the oldest first."""

    def add(self, request: Hashable, now: float) -> None:
        """Remembers a refusal."""
        key = hash(request)
        count, _ = self._refused.pop(key, (0, now))
        self._refused[key] = count + 1, now
        self._forget(now)

    def take(self, request: Hashable, now: float) -> bool:
        """Whether this request repeats a refused one. Uses the refusal up. Hashes nothing while there are no
        refusals."""
        self._forget(now)
        if not self._refused:
            return False
        key = hash(request)
        count, at_s = self._refused.get(key, (0, 0.0))
        if count > 1:
            self._refused[key] = count - 1, at_s
        elif count:
            del self._refused[key]
        return count > 0

    def _forget(self, now: float) -> None:
        while self._refused:
            _, at_s = next(iter(self._refused.values()))
            if now - at_s <= REFUSALS_KEPT_S and len(self._refused) <= MAX_REFUSALS_KEPT:
                return
            self._refused.popitem(last=False)


DEFAULT_LONG_PROMPT_TOKENS: int = CoordinatorConfig.model_fields["long_prompt_tokens"].default


class RequestStats:
    """Statistics by model. There are as many entries as models that workers have registered."""

    def __init__(self, long_prompt_tokens: int = DEFAULT_LONG_PROMPT_TOKENS) -> None:
        self.long_prompt_tokens = long_prompt_tokens
        """Prompts with at least this many tokens are long."""
        self._models: dict[str, ModelStats] = {}
        self.refused = RefusedRequests()
        self.demand = asyncio.Event()
        """Set when requests wait for workers; its waiter clears it."""

    def of(self, model: str) -> ModelStats:
        """The statistics of a model that is known to the registry; created on first use."""
        stats = self._models.get(model)
        if stats is None:
            stats = self._models[model] = ModelStats()
        return stats

    def set_held(self, model: str, held: Held) -> None:
        """Sets the queued requests of a model."""
        self.of(model).held = held
        if held.cause == "workers" and held.requests:
            self.demand.set()

    def set_without_pair(self, model: str, requests: int) -> None:
        """Sets how many requests for a model wait for workers outside of the queue."""
        self.of(model).without_pair = requests
        if requests:
            self.demand.set()

    def wait_for_workers(self, model: str = "") -> bool:
        """Whether requests for this base model, or for any, wait for workers."""
        return any(stats.waiting_for_workers for name, stats in self._models.items() if model in ("", name))

    def count_rejected(self, model: str) -> None:
        """Counts a request that was rejected before it was checked.

        Clients must not be able to create series: the request counts only if `model`, as the client wrote it, names a
        model with statistics, or is empty and there is only one.
        """
        stats = self._models.get(model)
        if stats is None and not model and len(self._models) == 1:
            stats = next(iter(self._models.values()))
        if stats is not None:
            stats.outcomes[scaling_pb2.OUTCOME_REJECTED] += 1

    def models(self) -> dict[str, ModelStats]:
        """All statistics, sorted by model name."""
        return dict(sorted(self._models.copy().items()))


PHASES: tuple[Phase, ...] = tuple(value for value in scaling_pb2.Phase.values() if value)
"""All phases, in order of the enum."""


def outcome_of(error: BaseException | None) -> Outcome:
    """How a request ended that raised `error`."""
    match error:
        case None:
            return scaling_pb2.OUTCOME_COMPLETED
        case asyncio.CancelledError():
            return scaling_pb2.OUTCOME_CANCELLED
        case ResourceExhaustedError():
            return scaling_pb2.OUTCOME_REJECTED
        case DeadlineExceededError():
            return scaling_pb2.OUTCOME_TIMED_OUT
    return scaling_pb2.OUTCOME_FAILED


def outcome_label(outcome: Outcome) -> str:
    """The label of an outcome in metrics and records."""
    return scaling_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
