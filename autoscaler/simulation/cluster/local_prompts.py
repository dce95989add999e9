"""Prompts that a decode replica computes itself, cut into the steps that its batch shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoscaler.simulation.cluster.replica import SimulatedRequest
from autoscaler.sizing.engine_model import EngineModel

MIN_CHUNK_TOKENS = 16


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """Positions [`computed`, `tokens`) of a prompt are still to be computed; then `done` is called with the time."""

    request: SimulatedRequest
    tokens: int
    computed: int
    done: Callable[[float], None]

    @property
    def remaining(self) -> int:
        """Tokens not computed yet."""
        return self.tokens - self.computed


class LocalPrompts:
    """The queue of one replica, in order of arrival. Chunks are cut as the engine's scheduler cuts them."""

    def __init__(self, engine: EngineModel) -> None:
        self._engine = engine
        self._queue: list[LocalPrompt] = []
        self.step: list[tuple[LocalPrompt, int]] = []
        """Prompts in the step under way, with their tokens in it."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return sum(prompt.remaining for prompt in self._queue)

    def add(self, prompt: LocalPrompt) -> None:
        """Queues a prompt."""
        self._queue.append(prompt)

    def remove(self, prompt: LocalPrompt) -> None:
        """Takes a prompt out."""
        self._queue.remove(prompt)
        self.step = [(one, tokens) for one, tokens in self.step if one is not prompt]

    def begin(self, batch: int, now_s: float) -> float:
        """Cuts a step that `batch` sequences share; how long its prompt tokens take, seconds."""
        budget = max(1, self._engine.max_step_tokens - batch)
        given: list[int] = []
        for prompt in self._queue:
            given.append(tokens := chunk(prompt.remaining, budget) if budget else 0)
            budget -= tokens
            if not budget:
                break
        self.step = []
        for prompt, tokens in zip(self._queue, given, strict=False):
            more = min(prompt.remaining - tokens, budget)
            budget -= more
            if tokens + more:
                self.step.append((prompt, tokens + more))
                if prompt.request.started_s is None:
                    prompt.request.started_s = now_s
        return sum(self._engine.prefill_s(p.computed, p.computed + tokens) for p, tokens in self.step)

    def end(self) -> Sequence[LocalPrompt]:
        """Ends the step; the prompts that are complete now."""
        for prompt, tokens in self.step:
            prompt.computed += tokens
        complete = [prompt for prompt, _ in self.step if not prompt.remaining]
        self._queue = [prompt for prompt in self._queue if prompt.remaining]
        self.step = []
        return complete


def chunk(remaining: int, budget: int) -> int:
    """Tokens of a prompt in a step: all, or half of the budget, so that short prompts behind are not blocked."""
    return remaining if remaining <= budget else min(budget, max(budget // 2, MIN_CHUNK_TOKENS))
