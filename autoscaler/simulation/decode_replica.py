"""A simulated decode replica: one continuous batch whose steps are not played one by one.

Between two events the batch has B sequences whose context grows by B tokens a step, so that k steps take
k (base + s B + c C) + c B k (k - 1) / 2 seconds. The number of steps done so far is the replica's own clock: a sequence
ends when that clock has gone on by its number of tokens. An event costs O(log B). Steps are treated as divisible: a
sequence joins in the middle of a step, which hides at most one step's time a request.

As in the engine, a request gets room for its prompt and then grows. When the pool is full, the sequence that joined
last gives its KV back, and is recomputed here when there is room again; the batch stands still for that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.jobs import Job
from autoscaler.simulation.replica import Agenda, SimulatedReplica

_SAME_STEP = 1e-6
_SPARE = 0.01
"""Share of the pool that newcomers leave free, so that running sequences can grow."""


class DecodeReplica(SimulatedReplica):
    """Decodes sequences. `reserved` is told when a job has got room, `done` when it ended."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        agenda: Agenda,
        reserved: Callable[[Job, float], None],
        done: Callable[[Job, float], None],
    ) -> None:
        super().__init__(name, ordered_s)
        self._engine = engine
        self._agenda = agenda
        self._reserved = reserved
        self._done = done
        self._batch: list[tuple[float, int, Job]] = []
        self._joined = 0
        self._waiting: deque[Job] = deque()
        self._steps = 0.0
        self._context = 0.0
        self._at_s = ordered_s
        self._version = 0
        self.held = 0
        """Sequences that have room: running ones and reservations."""
        self.reserved_tokens = 0
        """KV tokens of reservations whose sequence does not run yet."""
        self.preempted = 0
        self.local_tokens = 0
        """Prompt tokens that it computes itself, or will."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def waiting_reservations(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Sequences that it runs, has room for, or lets wait."""
        return self.held + len(self._waiting)

    @property
    def context_tokens(self) -> float:
        """KV tokens of the running batch and of reservations."""
        return self._context + self.reserved_tokens

    @property
    def step_s(self) -> float:
        """Duration of the present step; 0 when idle."""
        return self._engine.decode_step_s(len(self._batch), self._context) if self._batch else 0.0

    def reserve(self, job: Job, now_s: float) -> None:
        """Sets KV and a slot aside for a job, now or when there is room, first come first served."""
        self._waiting.append(job)
        self._admit(now_s)

    def prefill_here(self, job: Job, now_s: float) -> float:
        """Computes a prompt itself; the batch stands still meanwhile. Returns when it is computed."""
        job.started_s = max(now_s, self._at_s)
        return self._stand_still(job.prompt_tokens, now_s)

    def _stand_still(self, tokens: int, now_s: float) -> float:
        self._advance(now_s)
        self._at_s = max(now_s, self._at_s) + self._engine.prompt_s(tokens)
        self.local_tokens += tokens
        self._agenda.at(self._at_s, lambda _: self._computed_here(tokens))
        self._plan_next()
        return self._at_s

    def _computed_here(self, tokens: int) -> None:
        self.local_tokens -= tokens

    def join(self, job: Job, now_s: float) -> None:
        """Decodes a sequence whose KV has come: its first token is there already."""
        self._advance(now_s)
        self._joined += 1
        self.reserved_tokens -= job.kv_tokens
        self._context += job.kv_tokens + 1
        heappush(self._batch, (self._steps + job.output_tokens - 1 - job.decoded, self._joined, job))
        self._plan_next()

    def _admit(self, now_s: float) -> None:
        room = self._engine.kv_capacity_tokens * (1 - _SPARE)
        while self._waiting and self.held < self._engine.max_running_requests:
            job = self._waiting[0]
            # One that is larger than the pool gets all of it: it could never fit.
            if self.held and self._context_at(now_s) + self.reserved_tokens + job.kv_tokens > room:
                return
            self._waiting.popleft()
            self.held += 1
            self.reserved_tokens += job.kv_tokens
            if job.first_token_s is not None:
                computed_s = self._stand_still(job.kv_tokens, now_s)
                self._agenda.at(computed_s, self._rejoins(job))
            else:
                job.reserved_s = now_s
                self._reserved(job, now_s)
        self._plan_next()

    def _rejoins(self, job: Job) -> Callable[[float], None]:
        return lambda now_s: self.join(job, now_s)

    def _context_at(self, now_s: float) -> float:
        self._advance(now_s)
        return self._context

    def _preempt(self, now_s: float, version: int) -> None:
        """The pool is full: the sequence that joined last gives way."""
        if version != self._version:
            return
        self._advance(now_s)
        entry = max(self._batch, key=lambda running: running[1])
        self._batch.remove(entry)
        heapify(self._batch)
        job = entry[2]
        left = min(job.output_tokens - 1 - job.decoded, math.ceil(entry[0] - self._steps - _SAME_STEP))
        self._context -= job.output_tokens + job.prompt_tokens - (entry[0] - self._steps)
        job.decoded = job.output_tokens - 1 - left
        self.held -= 1
        self.preempted += 1
        self._waiting.appendleft(job)
        self._plan_next()

    def _coefficients(self) -> tuple[float, float]:
        """Seconds that the next k steps take, as alpha k^2 + beta k."""
        batch = len(self._batch)
        alpha = self._engine.context_token_s * batch / 2
        return alpha, self._engine.decode_step_s(batch, self._context) - alpha

    def _advance(self, now_s: float) -> None:
        """Lets the batch go on until `now_s`; it may stand still beyond that (`prefill_here`)."""
        elapsed_s = now_s - self._at_s
        if elapsed_s <= 0:
            return
        self._at_s = now_s
        if not self._batch:
            return
        alpha, beta = self._coefficients()
        steps = elapsed_s / beta
        if alpha:
            # The root of alpha k^2 + beta k = elapsed in the form that is stable for a small alpha.
            steps = 2 * elapsed_s / (beta + math.sqrt(beta * beta + 4 * alpha * elapsed_s))
        self._steps += steps
        self._context += steps * len(self._batch)

    def _plan_next(self) -> None:
        self._version += 1
        if not self._batch:
            return
        version = self._version
        alpha, beta = self._coefficients()
        steps = max(0.0, self._batch[0][0] - self._steps)
        happening = self._finish
        spare = self._engine.kv_capacity_tokens - self._context - self.reserved_tokens
        # One alone may grow beyond the pool: there is nobody to give way to.
        if len(self._batch) > 1 and spare < steps * len(self._batch):
            steps, happening = max(0.0, spare / len(self._batch)), self._preempt
        self._agenda.at(self._at_s + steps * (beta + alpha * steps), lambda now_s: happening(now_s, version))

    def _finish(self, now_s: float, version: int) -> None:
        if version != self._version:
            return
        self._advance(now_s)
        # This moment was computed as the one at which the first sequence ends: rounding must not undo that.
        missing = max(0.0, self._batch[0][0] - self._steps)
        self._steps += missing
        self._context += missing * len(self._batch)
        ended = []
        while self._batch and self._batch[0][0] <= self._steps + _SAME_STEP:
            job = heappop(self._batch)[2]
            self._context -= job.prompt_tokens + job.output_tokens
            self.held -= 1
            ended.append(job)
        if not self._batch:
            self._context = 0.0
        self._plan_next()
        for job in ended:
            self._done(job, now_s)
        self._admit(now_s)

    def leave(self, job: Job, now_s: float) -> None:
        """Gives back the room of a job that never ran here."""
        self.reserved_tokens -= job.kv_tokens
        self.held -= 1
        self._admit(now_s)
