"""A simulated prefill replica: one queue, steps of chunks, as the engine's scheduler cuts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.jobs import Job
from autoscaler.simulation.prefix_cache import PrefixCache
from autoscaler.simulation.replica import Agenda, SimulatedReplica
from engine.step_rates import StepRates

_MIN_CHUNK_TOKENS = 16


class PrefillReplica(SimulatedReplica):
    """Computes prompts. `done` is told each prompt that is complete, and when its KV is on decode."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        agenda: Agenda,
        cache: PrefixCache | None,
        done: Callable[[Job, float, float], None],
    ) -> None:
        super().__init__(name, ordered_s)
        self._engine = engine
        self._agenda = agenda
        self.cache = cache
        self._done = done
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._step: list[tuple[Job, int]] | None = None
        self._link_free_s = 0.0
        self._began_s = 0.0
        self.rates = StepRates()
        self.queued_tokens = 0
        """Prompt tokens to compute, of waiting and running prompts."""
        self.expected_tokens = 0
        """Prompt tokens of requests that were routed here and still wait for room on decode."""
        self.computed_tokens = 0
        self.busy_s = 0.0

    @property
    def waiting(self) -> int:
        """Prompts of which nothing is computed yet."""
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Prompts that run or wait."""
        return len(self._waiting) + len(self._running)

    def enqueue(self, job: Job, now_s: float) -> None:
        """Takes a prompt whose blocks decode has reserved."""
        if self.cache is not None:
            job.cached = job.computed = self.cache.cached_tokens(job.block_ids, job.prompt_tokens)
        self.queued_tokens += job.remaining
        self._waiting.append(job)
        if self._step is None:
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        budget = self._engine.max_step_tokens
        given: list[int] = []
        for job in self._running:
            tokens = _chunk(job.remaining, budget) if budget else 0
            given.append(tokens)
            budget -= tokens
        while budget > 0 and self._waiting and len(self._running) < self._engine.max_running_requests:
            job = self._waiting.popleft()
            job.started_s = now_s
            self._running.append(job)
            tokens = _chunk(job.remaining, budget)
            given.append(tokens)
            budget -= tokens
        duration_s = self._engine.prefill_base_s
        step = []
        for job, tokens in zip(self._running, given, strict=True):
            if budget:
                more = min(job.remaining - tokens, budget)
                tokens += more  # noqa: PLW2901 - what nobody takes goes to the first in line
                budget -= more
            if tokens:
                duration_s += self._engine.prefill_s(job.computed, job.computed + tokens)
                step.append((job, tokens))
        self._step, self._began_s = step, now_s
        self._agenda.at(now_s + duration_s, self._end)

    def _end(self, now_s: float) -> None:
        step, self._step = self._step or [], None
        total = 0
        complete = []
        for job, tokens in step:
            job.computed += tokens
            total += tokens
            if job.computed == job.prompt_tokens:
                complete.append(job)
        self.queued_tokens -= total
        self.computed_tokens += total
        self.busy_s += now_s - self._began_s
        self.rates.record(total, now_s - self._began_s)
        # Chunks are written while the next step computes; the lane carries one after the other.
        self._link_free_s = max(self._link_free_s, now_s) + self._engine.transfer_s(total)
        if complete:
            gone = set(map(id, complete))
            self._running = [job for job in self._running if id(job) not in gone]
        if self._running or self._waiting:
            self._begin(now_s)
        for job in complete:
            if self.cache is not None:
                self.cache.keep(job.block_ids)
            self._done(job, now_s, self._link_free_s)


def _chunk(remaining: int, budget: int) -> int:
    # A prompt that must be cut takes half of what is left, so that short ones behind it get through.
    return remaining if remaining <= budget else min(budget, max(budget // 2, _MIN_CHUNK_TOKENS))
