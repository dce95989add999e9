"""A simulated decode replica: one continuous batch, advanced in closed form instead of step by step.

Between two events the batch has B sequences whose context C grows by B tokens a step, so that k steps take
k (base + s B + c C) + c B k (k - 1) / 2 seconds. The number of steps done so far is the replica's own clock: a sequence
ends when that clock has advanced by its number of tokens. An event costs O(log B). Steps are divisible: a sequence may
join in the middle of a step, an error of at most one step per request.

While the replica computes prompts itself, its steps are simulated one by one: each has a token of every sequence, and
chunks of prompts. A sequence that joins during such a step takes part from the next one on.

As in the engine, KV for the prompt is reserved and then grows. When KV runs out, the sequence that joined last is
preempted, and recomputed here once there are free blocks again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from autoscaler.simulation.cluster.local_prompts import LocalPrompt, LocalPrompts
from autoscaler.simulation.cluster.prefill_replica import PrefixCache
from autoscaler.simulation.cluster.replica import DecodeReplica, EventQueue, SimulatedRequest
from autoscaler.sizing.engine_model import EngineModel

_SAME_STEP = 1e-6
_SPARE = 0.01
"""Share of the KV capacity that new requests leave free for running sequences to grow."""


class ClosedFormDecode(DecodeReplica):
    """Decodes sequences. Calls `reserved` when a request has its KV, `done` when it has ended."""

    def __init__(
        self,
        name: str,
        ordered_s: float,
        engine: EngineModel,
        events: EventQueue,
        reserved: Callable[[SimulatedRequest, float], None],
        done: Callable[[SimulatedRequest, float], None],
        cache: PrefixCache | None = None,
    ) -> None:
        """`cache`: of the prompts computed here."""
        super().__init__(name, ordered_s)
        self._engine = engine
        self._events = events
        self._reserved = reserved
        self._done = done
        self._batch: list[tuple[float, int, SimulatedRequest]] = []
        self._joined = 0
        self._waiting: deque[SimulatedRequest] = deque()
        self._steps = 0.0
        self._context = 0.0
        self._at_s = ordered_s
        self._version = 0
        self.held = 0
        """Sequences that hold KV: running ones and reservations."""
        self.reserved_tokens = 0
        """KV tokens reserved for sequences that do not run yet."""
        self.preempted = 0
        self._cache = cache
        self._prompts = LocalPrompts(engine)
        self.on_step: Callable[[Sequence[tuple[LocalPrompt, int]], float, float], None] = lambda *_: None
        """Called when a step with prompts has ended: their tokens in it, and when it began and ended."""
        self._sharing: int | None = None
        """Sequences in the step under way, where steps are simulated one by one; None: they are not."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def waiting_reservations(self) -> int:
        """Requests that wait for a reservation."""
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Sequences that run, hold a reservation or wait for one."""
        return self.held + len(self._waiting)

    @property
    def context_tokens(self) -> float:
        """KV tokens of the running batch and of reservations."""
        return self._context + self.reserved_tokens

    @property
    def local_tokens(self) -> int:
        """Prompt tokens to be computed here."""
        return self._prompts.tokens

    @property
    def step_s(self) -> float:
        """Duration of the current step, seconds; 0 when idle."""
        return self._engine.decode_step_s(len(self._batch), self._context) if self._batch else 0.0

    def produced(self, now_s: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """Running sequences with their output tokens so far."""
        self._advance(now_s)
        for end, _, request in self._batch:
            yield request, math.floor(request.output_tokens - (end - self._steps) + _SAME_STEP)

    def reserve(self, request: SimulatedRequest, now_s: float) -> None:
        """Reserves KV and a batch slot for a request, now or when they are free, in order of arrival."""
        self._waiting.append(request)
        self._admit(now_s)

    def prefill_here(
        self, request: SimulatedRequest, now_s: float, computed: Callable[[float], None]
    ) -> None:
        """Local prefill, in steps that the batch shares. Calls `computed` with the time when the prompt is."""

        def done(at_s: float) -> None:
            if self._cache is not None:
                self._cache.keep(request.block_ids)
            computed(at_s)

        if self._cache is not None:
            request.cached = self._cache.cached_tokens(request.block_ids, request.prompt_tokens)
        self.compute(LocalPrompt(request, request.prompt_tokens, request.cached, done), now_s)

    def compute(self, prompt: LocalPrompt, now_s: float) -> None:
        """Computes a prompt in steps that the batch shares."""
        self._prompts.add(prompt)
        self._begin_step(now_s)

    def give_up(self, prompt: LocalPrompt) -> None:
        """Computes a prompt no further. The step that it is in takes as long as planned."""
        self._prompts.remove(prompt)

    def _begin_step(self, now_s: float) -> None:
        """Begins a step with prompt tokens, or leaves the batch to the closed form where there are none."""
        if self._sharing is not None or self.ended_s is not None:
            return
        if not len(self._prompts):
            self._plan_next()
            return
        self._advance(now_s)
        self._version += 1
        engine, self._sharing = self._engine, len(self._batch)
        prompts_s = self._prompts.begin(self._sharing, now_s)
        decodes_s = engine.sequence_s * self._sharing + engine.context_token_s * self._context
        self._events.at(now_s + engine.prefill_base_s + decodes_s + prompts_s, self._end_step)

    def _end_step(self, now_s: float) -> None:
        if self.ended_s is not None:
            return
        shared, began_s = self._sharing or 0, self._at_s
        self._sharing, self._at_s = None, now_s
        if shared:
            self._steps += 1
            self._context += shared
        self.on_step(self._prompts.step, began_s, now_s)
        complete = self._prompts.end()
        self._end_sequences(now_s)
        while len(self._batch) > 1 and self._context + self.reserved_tokens > self._engine.kv_capacity_tokens:
            self._preempt_last()
        for prompt in complete:
            prompt.done(now_s)
        # After the events that `done` has made for now: a prompt's sequence takes part in the next step.
        self._events.at(now_s, self._begin_step)

    def join(self, request: SimulatedRequest, now_s: float) -> None:
        """Adds a sequence to the batch: its KV has arrived and its first token is known."""
        self._advance(now_s)
        self._joined += 1
        self.reserved_tokens -= request.kv_tokens
        self._context += request.kv_tokens + 1
        first = self._steps + (1 if self._sharing else 0)
        heappush(self._batch, (first + request.output_tokens - 1 - request.decoded, self._joined, request))
        self._plan_next()

    def _admit(self, now_s: float) -> None:
        admissible_tokens = self._engine.kv_capacity_tokens * (1 - _SPARE)
        while self._waiting and self.held < self._engine.max_running_requests:
            request = self._waiting[0]
            # A request larger than the whole capacity is admitted when nothing else is held.
            if (
                self.held
                and self._context_at(now_s) + self.reserved_tokens + request.kv_tokens > admissible_tokens
            ):
                break
            self._waiting.popleft()
            self.held += 1
            self.reserved_tokens += request.kv_tokens
            if request.rejoins:
                request.rejoins = False
                self.compute(LocalPrompt(request, request.kv_tokens, 0, self._rejoins(request)), now_s)
            else:
                request.reserved_s = now_s
                self._reserved(request, now_s)
        self._plan_next()

    def _rejoins(self, request: SimulatedRequest) -> Callable[[float], None]:
        def joins(now_s: float) -> None:
            request.computed = request.kv_tokens
            self.join(request, now_s)

        return joins

    def _context_at(self, now_s: float) -> float:
        self._advance(now_s)
        return self._context

    def _preempt(self, now_s: float, version: int) -> None:
        """KV is exhausted: preempts the sequence that joined last."""
        if version != self._version:
            return
        self._advance(now_s)
        self._preempt_last()
        self._plan_next()

    def _preempt_last(self) -> None:
        entry = max(self._batch, key=lambda running: running[1])
        self._batch.remove(entry)
        heapify(self._batch)
        request = entry[2]
        left = min(
            request.output_tokens - 1 - request.decoded, math.ceil(entry[0] - self._steps - _SAME_STEP)
        )
        self._context -= request.output_tokens + request.prompt_tokens - (entry[0] - self._steps)
        request.decoded, request.rejoins = request.output_tokens - 1 - left, True
        self.held -= 1
        self.preempted += 1
        self._waiting.appendleft(request)

    def _coefficients(self) -> tuple[float, float]:
        """(alpha, beta): the next k steps take alpha k^2 + beta k seconds."""
        batch = len(self._batch)
        alpha = self._engine.context_token_s * batch / 2
        return alpha, self._engine.decode_step_s(batch, self._context) - alpha

    def _advance(self, now_s: float) -> None:
        """Advances the batch to `now_s`; no effect during a step that is simulated by itself."""
        elapsed_s = now_s - self._at_s
        if elapsed_s <= 0 or self._sharing is not None:
            return
        self._at_s = now_s
        if not self._batch:
            return
        alpha, beta = self._coefficients()
        steps = elapsed_s / beta
        if alpha:
            # The root of alpha k^2 + beta k = elapsed, in the form that is stable for small alpha.
            steps = 2 * elapsed_s / (beta + math.sqrt(beta * beta + 4 * alpha * elapsed_s))
        self._steps += steps
        self._context += steps * len(self._batch)

    def _plan_next(self) -> None:
        self._version += 1
        if not self._batch or self._sharing is not None:
            return
        version = self._version
        alpha, beta = self._coefficients()
        steps = max(0.0, self._batch[0][0] - self._steps)
        event = self._finish
        spare = self._engine.kv_capacity_tokens - self._context - self.reserved_tokens
        # A single sequence may grow beyond the capacity: there is nothing to preempt for it.
        if len(self._batch) > 1 and spare < steps * len(self._batch):
            steps, event = max(0.0, spare / len(self._batch)), self._preempt
        self._events.at(self._at_s + steps * (beta + alpha * steps), lambda now_s: event(now_s, version))

    def _finish(self, now_s: float, version: int) -> None:
        if version != self._version:
            return
        self._advance(now_s)
        # By construction the first sequence ends now: correct the rounding error.
        missing = max(0.0, self._batch[0][0] - self._steps)
        self._steps += missing
        self._context += missing * len(self._batch)
        self._end_sequences(now_s)

    def _end_sequences(self, now_s: float) -> None:
        ended = []
        while self._batch and self._batch[0][0] <= self._steps + _SAME_STEP:
            request = heappop(self._batch)[2]
            self._context -= request.prompt_tokens + request.output_tokens
            self.held -= 1
            ended.append(request)
        if not self._batch:
            self._context = 0.0
        for request in ended:
            self._done(request, now_s)
        self._admit(now_s)

    def lose(self, now_s: float) -> Mapping[SimulatedRequest, int]:
        """Its machine is taken away with all that it holds. The tokens of the answers so far."""
        produced = dict(self.produced(now_s))
        self._batch, self._prompts, self._sharing = [], LocalPrompts(self._engine), None
        self._waiting.clear()
        self._context, self.held, self.reserved_tokens = 0.0, 0, 0
        self._version += 1
        return produced

    def withdraw(self, request: SimulatedRequest, now_s: float) -> None:
        """Gives up a request whose prompt is not computed, by another replica."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self.leave(request, now_s)

    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """Releases the reservation of a request that never ran here."""
        self.reserved_tokens -= request.kv_tokens
        self.held -= 1
        self._admit(now_s)
