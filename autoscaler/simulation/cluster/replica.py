"""A simulated replica: one engine that computes prompts, decodes sequences, or both, by its role.

While it computes prompts, its steps are simulated one by one: each has a token of every sequence, and chunks of
prompts. A sequence that joins during such a step takes part from the next one on.

Without prompts the batch is advanced in closed form. Between two events it has B sequences whose context C grows by B
tokens a step, so k steps take k (base + s B + c C) + c B k (k - 1) / 2 seconds. The number of steps done so far is the
replica's own clock: a sequence ends when the clock has advanced by the sequence's number of tokens. An event costs
O(log B). Steps are divisible: a sequence may join in the middle of a step, an error of at most one step per request.

As in the engine, KV for the prompt is reserved and then grows. When KV runs out, the sequence that joined last is
preempted, and recomputed here once there are free blocks again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from autoscaler.simulation.cluster.prefix_cache import PrefixCache
from autoscaler.simulation.cluster.prompt_queue import PromptQueue, QueuedPrompt
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.traces.trace import TraceRequest
from autoscaler.snapshot import ReplicaState
from splitserve.latency_model import LatencyModel
from splitserve.roles import POOLS_OF, PoolName, RoleName

_SAME_STEP = 1e-6
_SPARE = 0.01
"""Share of the KV capacity that new requests leave free for running sequences to grow."""

Event = Callable[[float], None]
"""Callback of an event; its argument is the time, seconds."""


class EventQueue:
    """Future events in order of time; ties in order of insertion."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Event]] = []
        self._number = 0

    def at(self, when_s: float, event: Event) -> None:
        """Schedules an event."""
        self._number += 1
        heappush(self._events, (when_s, self._number, event))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity when there is none."""
        return self._events[0][0] if self._events else math.inf

    def run_until(self, end_s: float) -> None:
        """Runs the events until this time, included, and those that they schedule."""
        while self._events and self._events[0][0] <= end_s:
            when_s, _, event = heappop(self._events)
            event(when_s)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """State and timestamps of one request. Times in seconds of the virtual clock; None: not yet."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    held_s: float = 0.0
    """How long it waited in admission for capacity of prefill workers."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    computed: int = 0
    """Prompt tokens computed, including cached ones."""
    decoded: int = 0
    """Tokens after the first that were decoded before a preemption."""
    rejoins: bool = False
    """Whether it was preempted, so that its decode replica computes it again."""
    relieves_prefill: bool = False
    """Whether its decode replica computes the prompt only because prompts wait at the prefill replica."""
    prefill: SimulatedReplica | None = None
    decode: SimulatedReplica | None = None
    reserved_s: float | None = None
    """When decode reserved its KV."""
    started_s: float | None = None
    """When the first chunk of its prompt started."""
    first_token_s: float | None = None
    joined_s: float | None = None
    """When its KV was complete on the decode replica."""
    finished_s: float | None = None
    failed: bool = False

    @classmethod
    def of(cls, request: TraceRequest) -> SimulatedRequest:
        """A request of a trace, before it arrives."""
        return cls(request.arrival_s, request.prompt_tokens, request.output_tokens, request.block_ids)

    @property
    def kv_tokens(self) -> int:
        """KV tokens needed on decode at the start: the prompt, and what was decoded before a preemption."""
        return self.prompt_tokens + self.decoded

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, handoff included; None with fewer than two tokens."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class ReplicaCalls:
    """Callbacks of a replica into its cluster. Times in seconds."""

    reserved: Callable[[SimulatedRequest, float], None]
    """A request's KV is reserved, at this time."""
    computed: Callable[[SimulatedRequest, float, float], None]
    """A prompt is computed, at the first time; its KV is on the decode replica at the second."""
    decoded: Callable[[SimulatedRequest, float], None]
    """A request has ended, at this time."""


class SimulatedReplica:
    """A replica from the order to start it until it ended."""

    def __init__(
        self,
        name: str,
        role: RoleName,
        ordered_s: float,
        engine: EngineModel,
        events: EventQueue,
        calls: ReplicaCalls,
        cache: PrefixCache | None = None,
        tpot_s: float | None = None,
    ) -> None:
        """`cache`: keeps the prompts that are computed here or whose KV arrives here. `tpot_s`: all requests'
        target."""
        self.name, self.role = name, role
        self.state = ReplicaState.STARTING
        self.since_s = self.ordered_s = ordered_s
        self.ended_s: float | None = None
        self.assigned = 0
        """Requests routed to it that have not ended."""
        self.computed_tokens, self.busy_s = 0, 0.0
        """Prompt tokens computed so far, and the seconds of the steps that had any."""
        self.cache = cache
        self._roles: list[tuple[RoleName, float]] = [(role, ordered_s)]
        """Its roles so far, each with the time of its beginning."""
        self._engine, self._events, self._calls = engine, events, calls
        self.prompts = PromptQueue(engine, tpot_s)
        self._handed_off = 0
        """Prompts computed here for other replicas."""
        self._lane_free_s = self._began_s = 0.0
        self._batch: list[tuple[float, int, SimulatedRequest]] = []
        self._joined = 0
        self._waiting: deque[SimulatedRequest] = deque()
        self._steps = self._context = 0.0
        self._at_s = ordered_s
        self._version = 0
        self.held = 0
        """Sequences that hold KV: running ones and reservations."""
        self.reserved_tokens = 0
        """KV tokens reserved for sequences that do not run yet."""
        self.preempted = 0
        self._sharing: int | None = None
        """Sequences in the step under way while steps are simulated one by one; else None."""

    @property
    def pools(self) -> frozenset[PoolName]:
        """The pools that it is in."""
        return POOLS_OF[self.role]

    @property
    def load(self) -> int:
        """Requests that run or wait here. The least loaded replica is drained first."""
        return self._handed_off + self.held + len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def waiting_reservations(self) -> int:
        """Requests that wait for a reservation."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> float:
        """KV tokens of the running batch and of reservations."""
        return self._context + self.reserved_tokens

    @property
    def latency(self) -> LatencyModel:
        """The part of the latency model that it has measured, as workers report it."""
        engine = self._engine
        return LatencyModel(
            engine.prefill if self.computed_tokens else None, engine.decode if self._joined else None
        )

    def enter(self, state: ReplicaState, now_s: float) -> None:
        """Enters a state."""
        self.state, self.since_s = state, now_s

    def take_role(self, role: RoleName, now_s: float) -> None:
        """Takes another role. Requests under way go on."""
        self.role = role
        self._roles.append((role, now_s))

    def hours_as(self, role: RoleName, end_s: float) -> float:
        """Hours with this role, from its order until it ended or until `end_s`."""
        end_s = min(end_s, end_s if self.ended_s is None else self.ended_s)
        ends = [since_s for _, since_s in self._roles[1:]] + [end_s]
        spans = (
            min(until_s, end_s) - since_s
            for (earlier_role, since_s), until_s in zip(self._roles, ends, strict=True)
            if earlier_role == role
        )
        return sum(max(0.0, span_s) for span_s in spans) / 3600

    def produced(self, now_s: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """Running sequences with their output tokens so far."""
        self._advance(now_s)
        for end, _, request in self._batch:
            yield request, math.floor(request.output_tokens - (end - self._steps) + _SAME_STEP)

    def reserve(self, request: SimulatedRequest, now_s: float) -> None:
        """Reserves KV and a batch slot for a request, now or when they are free, in order of arrival."""
        self._waiting.append(request)
        self._admit(now_s)

    def compute(self, request: SimulatedRequest, now_s: float, *, handed_off: bool) -> None:
        """Computes a prompt in steps that the batch here shares. `handed_off`: its KV goes to another replica."""
        if self.cache is not None:
            request.cached = self.cache.cached_tokens(request.block_ids, request.prompt_tokens)
        self._handed_off += handed_off

        def done(began_s: float, at_s: float) -> None:
            request.started_s = began_s
            self._handed_off -= handed_off
            self._keep(request)
            self._calls.computed(request, at_s, self._lane_free_s if handed_off else at_s)

        self.prompts.add(QueuedPrompt(request.prompt_tokens, request.cached, done, handed_off))
        self._begin_step(now_s)

    def join(self, request: SimulatedRequest, now_s: float) -> None:
        """Adds a sequence to the batch: its KV has arrived and its first token is known."""
        self._advance(now_s)
        self._joined += 1
        self.reserved_tokens -= request.kv_tokens
        self._context += request.kv_tokens + 1
        self._keep(request)
        first = self._steps + (1 if self._sharing else 0)
        heappush(self._batch, (first + request.output_tokens - 1 - request.decoded, self._joined, request))
        self._plan_next()

    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """Releases the reservation of a request that never ran here."""
        self.reserved_tokens -= request.kv_tokens
        self.held -= 1
        self._admit(now_s)

    def _keep(self, request: SimulatedRequest) -> None:
        """Caches a prompt in the KV that sequences do not use."""
        if self.cache is not None and request.block_ids:
            self.cache.keep(request.block_ids, int(self.context_tokens))

    def _begin_step(self, now_s: float) -> None:
        """Begins a step with prompt tokens; without prompts the batch goes on in closed form."""
        if self._sharing is not None:
            return
        if not self.prompts.tokens:
            self._plan_next()
            return
        self._advance(now_s)
        self._version += 1
        latency, self._sharing, self._began_s = self._engine.decode, len(self._batch), now_s
        prompts_s = self.prompts.begin_step(self._sharing, self._context, now_s)
        decodes_s = latency.decode_step_s(self._sharing, self._context) - latency.base_s
        self._events.at(now_s + self._engine.prefill.base_s + decodes_s + prompts_s, self._end_step)

    def _end_step(self, now_s: float) -> None:
        shared = self._sharing or 0
        self._sharing, self._at_s = None, now_s
        if shared:
            self._steps += 1
            self._context += shared
        complete, computed, handed_off = self.prompts.end_step()
        self.computed_tokens += computed
        self.busy_s += now_s - self._began_s
        # Writes overlap with the next step; the link carries one chunk after the other.
        self._lane_free_s = max(self._lane_free_s, now_s) + self._engine.transfer_s(handed_off)
        self._end_sequences(now_s)
        while len(self._batch) > 1 and self._context + self.reserved_tokens > self._engine.kv_capacity_tokens:
            self._preempt_last()
        for prompt in complete:
            prompt.done(prompt.began_s or 0.0, now_s)
        # After the events that `done` has scheduled for now, so that a prompt's sequence takes part in the next step.
        self._events.at(now_s, self._begin_step)

    def _admit(self, now_s: float) -> None:
        admissible_tokens = self._engine.kv_capacity_tokens * (1 - _SPARE)
        while self._waiting and self.held < self._engine.max_running_requests:
            request = self._waiting[0]
            if self.held:  # a request larger than the whole capacity is admitted when nothing else is
                self._advance(now_s)
                if self.context_tokens + request.kv_tokens > admissible_tokens:
                    break
            self._waiting.popleft()
            self.held += 1
            self.reserved_tokens += request.kv_tokens
            if request.rejoins:
                request.rejoins = False
                rejoin = partial(self._rejoin, request)
                self.prompts.add(QueuedPrompt(request.kv_tokens, 0, rejoin, handed_off=False))
                self._begin_step(now_s)
            else:
                request.reserved_s = now_s
                self._calls.reserved(request, now_s)
        self._plan_next()

    def _rejoin(self, request: SimulatedRequest, _began_s: float, now_s: float) -> None:
        request.computed = request.kv_tokens
        self.join(request, now_s)

    def _preempt(self, now_s: float) -> None:
        """KV is exhausted: preempts the sequence that joined last."""
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
        alpha = self._engine.decode.context_token_s * batch / 2
        return alpha, self._engine.decode.decode_step_s(batch, self._context) - alpha

    def _advance(self, now_s: float) -> None:
        """Advances the batch to `now_s`; no effect while steps are simulated one by one."""
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
        self._events.at(
            self._at_s + steps * (beta + alpha * steps),
            lambda now_s: event(now_s) if version == self._version else None,
        )

    def _finish(self, now_s: float) -> None:
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
            self._calls.decoded(request, now_s)
        self._admit(now_s)
