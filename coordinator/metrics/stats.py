"""Request statistics: demand at arrival, time by phase, outcomes. Pure.

All counts are cumulative, so that readers compute their own windows; `scaling.proto` defines each of them. Requests
are recorded by `coordinator.metrics.recorder`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from coordinator.admission.entry import NOTHING_HELD, Held
from coordinator.request.state import Stage
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.histograms import DurationCounts
from splitserve.v1 import scaling_pb2

Outcome: TypeAlias = scaling_pb2.Outcome.ValueType
CachePool = Literal["prefill", "decode"]
"""Whose prefix cache: the prefill worker's spares computing, the decode worker's spares sending."""
REFUSALS_KEPT_S = 120.0
"""How long a refusal is remembered: twice the longest hint when to come again."""
MAX_REFUSALS_KEPT = 65_536
OUTCOMES: tuple[Outcome, ...] = tuple(value for value in scaling_pb2.Outcome.values() if value)


@dataclass(slots=True)
class PhaseCounts:
    """Durations of one phase. Cold samples are counted apart: autoscaling ignores them, but clients saw them."""

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
    """Those of them that were not computed, and those that were not sent."""
    prefilling_tokens: float = 0.0
    """Uncached prompt tokens of the requests in stage PREFILLING."""
    held: Held = NOTHING_HELD
    """Queued requests; part of those in stage ADMITTING."""
    without_pair: int = 0
    """Requests that wait for workers outside the queue."""

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
    """Tells whether a request is one that was refused before and comes again, so that demand counts once.

    Each refusal excuses one later request of the same tenant with the same prompt and limits from being counted.
    Clients that were refused a prompt and then send it as a request of its own are taken for the same client. Holds the
    refusals of the last `REFUSALS_KEPT_S` seconds, `MAX_REFUSALS_KEPT` prompts at most; `now` on any monotonic clock.

    A `request` is what makes two equal: model, tenant, prompt and limits.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Refusals not excused yet and the time of the last one, by fingerprint, the oldest first."""

    def add(self, request: Hashable, now: float) -> None:
        """A request was refused."""
        key = hash(request)
        count, _ = self._refused.pop(key, (0, now))
        self._refused[key] = count + 1, now
        self._forget(now)

    def take(self, request: Hashable, now: float) -> bool:
        """Whether this request repeats a refused one; that refusal is used up. Costs nothing while none was refused."""
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
        """Prompts of as many tokens or more are long."""
        self._models: dict[str, ModelStats] = {}
        self.refused = RefusedRequests()
        self.demand = asyncio.Event()
        """Set when requests wait for workers; who waits for it clears it."""

    def of(self, model: str) -> ModelStats:
        """The statistics of a model that is known to the registry; created on first use."""
        stats = self._models.get(model)
        if stats is None:
            stats = self._models[model] = ModelStats()
        return stats

    def set_held(self, model: str, held: Held) -> None:
        """Sets what admission holds of a model."""
        self.of(model).held = held
        if held.cause == "workers" and held.requests:
            self.demand.set()

    def set_without_pair(self, model: str, requests: int) -> None:
        """Sets how many requests for a model wait for workers outside the queue."""
        self.of(model).without_pair = requests
        if requests:
            self.demand.set()

    def wait_for_workers(self, model: str = "") -> bool:
        """Whether requests for this base model, or for any, wait for workers."""
        return any(one.waiting_for_workers for name, one in self._models.items() if model in ("", name))

    def count_rejected(self, model: str) -> None:
        """Counts a request that was rejected before any of it was examined.

        `model` is what the client wrote, and clients must not be able to create series: it is counted only if it names
        a model with statistics, or is empty and there is only one.
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
