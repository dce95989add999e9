"""What the coordinator counts of its requests: demand at arrival, time by phase, ends. Pure; time is an argument.

Everything here only grows, so that readers make windows of their own; see `scaling.proto` for the meaning of each
figure. Requests write through `coordinator.request_record`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from coordinator.phase_counts import PHASES, Phase, PhaseCounts
from splitserve.v1 import scaling_pb2

Outcome: TypeAlias = scaling_pb2.Outcome.ValueType
OUTCOMES: tuple[Outcome, ...] = tuple(value for value in scaling_pb2.Outcome.values() if value)

DEFAULT_OUTPUT_TOKENS = 128.0
"""Expected of an answer until one has ended."""
_MEMORY_ANSWERS = 64
"""Answers, about, that the learned means reach back."""


class Stage(enum.Enum):
    """What a request waits for."""

    ADMITTING = "admitting"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(slots=True)
class LearnedMean:
    """A mean over the last values; plain at first, exponential once there are many."""

    value: float
    seen: int = 0

    def add(self, value: float) -> None:
        """Takes one more value."""
        self.seen = min(self.seen + 1, _MEMORY_ANSWERS)
        self.value += (value - self.value) / self.seen


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that wait at the coordinator until workers have room; see `coordinator.admission`."""

    requests: int = 0
    uncached_tokens: float = 0.0
    cause: Literal["prefill", "decode"] = "prefill"
    """The pool that they wait for."""


@dataclass(slots=True)
class ModelBook:
    """The figures of one model."""

    requests: int = 0
    prompt_tokens: int = 0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    phases: Mapping[Phase, PhaseCounts] = field(
        default_factory=lambda: {phase: PhaseCounts() for phase in PHASES}
    )
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    in_stage: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    prefilling_tokens: float = 0.0
    """Uncached prompt tokens of the requests in stage PREFILLING."""
    held: Held = Held()
    """Part of those in stage ADMITTING."""
    expected_output: LearnedMean = field(default_factory=lambda: LearnedMean(DEFAULT_OUTPUT_TOKENS))
    cached_share: LearnedMean = field(default_factory=lambda: LearnedMean(0.0))

    @property
    def stages(self) -> dict[Stage, int]:
        """Requests in progress by what they wait for: those held at the coordinator count for the pool without room."""
        held = self.held
        counts = self.in_stage.copy()
        counts[Stage.ADMITTING] = max(0, counts[Stage.ADMITTING] - held.requests)
        counts[Stage.PREFILLING if held.cause == "prefill" else Stage.RESERVING] += held.requests
        return counts

    @property
    def backlog_tokens(self) -> float:
        """Uncached prompt tokens that wait for prefill workers, there or here."""
        held = self.held
        return self.prefilling_tokens + (held.uncached_tokens if held.cause == "prefill" else 0.0)

    def arrived(self, prompt_tokens: int, max_tokens: int) -> float:
        """Counts demand; returns how many prompt tokens are expected to need computing."""
        uncached = prompt_tokens * (1.0 - self.cached_share.value)
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.uncached_tokens += uncached
        self.output_tokens += min(self.expected_output.value, max_tokens)
        return uncached


class SignalBook:
    """The figures of all models, by name. Their number is that of the models that workers have registered."""

    def __init__(self) -> None:
        self._models: dict[str, ModelBook] = {}

    def of(self, model: str) -> ModelBook:
        """The figures of a model that is known to the registry; new ones if it had none."""
        book = self._models.get(model)
        if book is None:
            book = self._models[model] = ModelBook()
        return book

    def turned_away(self, model: str) -> None:
        """Counts a request that was refused at the door, before anything of it was looked at.

        `model` is what the client wrote: unless it names a model with figures, or none where there is one
        only, nothing is counted, for clients must not make series.
        """
        book = self._models.get(model)
        if book is None and not model and len(self._models) == 1:
            book = next(iter(self._models.values()))
        if book is not None:
            book.outcomes[scaling_pb2.OUTCOME_REJECTED] += 1

    def models(self) -> dict[str, ModelBook]:
        """All figures, in order of the models' names."""
        return dict(sorted(self._models.copy().items()))
