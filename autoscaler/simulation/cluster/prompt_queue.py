"""The prompts that one simulated replica computes, cut into steps as the engine's scheduler cuts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoscaler.simulation.engine_model import EngineModel
from engine.core.scheduler import MIN_PROMPT_TOKENS, PacedStream, prompt_budget


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """Positions [`computed`, `tokens`) of a prompt are still to be computed."""

    tokens: int
    computed: int
    done: Callable[[float, float], None]
    """Called with two times: when the first chunk began, and when the whole prompt is computed."""
    handed_off: bool
    """Whether its KV is written to another replica while it is computed."""
    began_s: float | None = None
    """When the first chunk began; None while the prompt waits."""

    @property
    def remaining(self) -> int:
        """Tokens not computed yet."""
        return self.tokens - self.computed


class PromptQueue:
    """Prompts in order of arrival. Those that have begun share the steps."""

    def __init__(self, engine: EngineModel, tpot_s: float | None) -> None:
        """`tpot_s`: the TPOT target of all requests; None: no target."""
        self._engine, self._tpot_s = engine, tpot_s
        self._waiting: deque[QueuedPrompt] = deque()
        self._running: list[QueuedPrompt] = []
        self._step: list[tuple[QueuedPrompt, int]] = []
        """Prompts in the step under way, with their tokens in it."""
        self.tokens = 0
        """Prompt tokens to compute."""

    @property
    def waiting(self) -> int:
        """Prompts that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Prompts that have begun."""
        return len(self._running)

    def add(self, prompt: QueuedPrompt) -> None:
        """Queues a prompt."""
        self.tokens += prompt.remaining
        self._waiting.append(prompt)

    def begin_step(self, batch: int, context_tokens: float, now_s: float) -> float:
        """Cuts a step beside `batch` sequences that have `context_tokens` of KV together. Returns the seconds that the
        prompt tokens add to the step."""
        budget = self._budget(batch, context_tokens)
        shares: list[int] = []
        for prompt in self._running:
            shares.append(_chunk(prompt.remaining, budget))
            budget -= shares[-1]
        while budget > 0 and self._waiting and len(self._running) < self._engine.max_running_requests:
            prompt = self._waiting.popleft()
            prompt.began_s = now_s
            self._running.append(prompt)
            shares.append(_chunk(prompt.remaining, budget))
            budget -= shares[-1]
        self._step = []
        for prompt, share in zip(self._running, shares, strict=True):
            rest = min(
                prompt.remaining - share, budget
            )  # the unused budget goes to the first prompts in line
            budget -= rest
            if share + rest:
                self._step.append((prompt, share + rest))
        return self._engine.chunks_s((tokens, prompt.computed) for prompt, tokens in self._step)

    def end_step(self) -> tuple[Sequence[QueuedPrompt], int, int]:
        """Ends the step. Returns the prompts that are complete, the tokens computed, and how many of them to hand
        off."""
        computed = handed_off = 0
        for prompt, tokens in self._step:
            prompt.computed += tokens
            computed += tokens
            handed_off += tokens if prompt.handed_off else 0
        complete = [prompt for prompt, _ in self._step if not prompt.remaining]
        if complete:
            self._running = [prompt for prompt in self._running if prompt.remaining]
        self._step = []
        self.tokens -= computed
        return complete, computed, handed_off

    def _budget(self, batch: int, context_tokens: float) -> int:
        left = max(1, self._engine.max_step_tokens - batch)
        streams = [PacedStream(round(context_tokens / batch), self._tpot_s)] * batch if batch else ()
        return prompt_budget(left, streams, self._engine.latency)


def _chunk(remaining: int, budget: int) -> int:
    """Tokens of a prompt in a step: all, or half of the budget, so that short prompts behind are not blocked."""
    return remaining if remaining <= budget else min(budget, max(budget // 2, MIN_PROMPT_TOKENS))
