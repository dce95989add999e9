"""What replicas of both pools have in common: identity, life cycle, and the event queue of the virtual clock.

A replica is computed in closed form (`prefill_replica.py`, `decode_replica.py`), or step by step by the engine's own
core (`stepped`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from autoscaler.simulation.traces.trace import TraceRequest
from autoscaler.snapshot import ReplicaState
from engine.pacing.step_time_fit import DecodeStepFit, PromptFit

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
        return self._events[0][0] if self._events else float("inf")

    def pop(self) -> tuple[float, Event]:
        """Removes and returns the next event."""
        when_s, _, event = heappop(self._events)
        return when_s, event


class SimulatedReplica(ABC):
    """A replica from the order to start it until it ended."""

    def __init__(self, name: str, ordered_s: float) -> None:
        self.name = name
        self.state = ReplicaState.STARTING
        self.since_s = ordered_s
        self.ordered_s = ordered_s
        self.ended_s: float | None = None
        self.replica_class, self.speed = "", 1.0
        """Its class, and how many replicas of speed 1 do its work; of a neutral one, as it decodes."""
        self.asleep = self.waking = False
        """Whether it is a standby that sleeps, and whether it is to join since."""
        self.assigned = 0
        """Requests routed to it that have not ended."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Requests that run or wait here. The least loaded replica is drained first."""

    @property
    def is_up(self) -> bool:
        """Whether its process has started and not ended."""
        return self.state is not ReplicaState.STARTING and self.ended_s is None

    def enter(self, state: ReplicaState, now_s: float) -> None:
        """Enters a state."""
        self.state, self.since_s = state, now_s


class SimulatedRequest:
    """State and timestamps of one request. Times in seconds of the virtual clock; None: has not happened."""

    __slots__ = (
        "admitted_s",
        "arrival_s",
        "block_ids",
        "cached",
        "computed",
        "decode",
        "decoded",
        "failed",
        "finished_s",
        "first_times",
        "first_token_s",
        "held_s",
        "joined_s",
        "output_tokens",
        "prefill",
        "prompt_tokens",
        "rejoins",
        "reserved_s",
        "started_s",
    )

    def __init__(self, request: TraceRequest) -> None:
        self.arrival_s = request.arrival_s
        self.admitted_s = request.arrival_s
        """When admission let it through; its arrival where there is none."""
        self.held_s: tuple[float, float] = (0.0, 0.0)
        """How long admission held it for want of capacity: of prefill, and of decode."""
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.block_ids = request.block_ids
        self.cached = 0
        """Prompt tokens found in the prefix cache."""
        self.computed = 0
        """Prompt tokens computed, including cached ones."""
        self.decoded = 0
        """Tokens after the first that were decoded before a preemption, or before its machine was taken away."""
        self.rejoins = False
        """Whether it was preempted, and its decode replica computes it again."""
        self.prefill: SimulatedReplica | None = None
        self.decode: SimulatedReplica | None = None
        self.reserved_s: float | None = None
        """When decode reserved its KV."""
        self.started_s: float | None = None
        """When its first chunk started."""
        self.first_token_s: float | None = None
        self.joined_s: float | None = None
        """When its KV was complete on decode."""
        self.finished_s: float | None = None
        self.failed = False
        self.first_times: tuple[float | None, float | None, float | None] | None = None
        """`reserved_s`, `started_s` and `joined_s` of the attempt with the first token, where it was not the last."""

    @property
    def remaining(self) -> int:
        """Prompt tokens not computed yet, those of the answer so far among them."""
        return self.kv_tokens - self.computed

    @property
    def kv_tokens(self) -> int:
        """KV tokens needed on decode at the start: the prompt, and what was decoded before a preemption."""
        return self.prompt_tokens + self.decoded

    def begin_again(self, tokens: int) -> None:
        """Its replica is gone; `tokens` of its answer were there."""
        if self.first_token_s is not None and self.first_times is None:
            self.first_times = self.reserved_s, self.started_s, self.joined_s
        self.decoded = max(self.decoded, tokens - 1)
        self.prefill = self.decode = None
        self.computed, self.rejoins = 0, False

    def keep_first_times(self) -> None:
        """Once it has ended: its phases are those of the attempt that gave the first token."""
        if self.first_times is not None:
            self.reserved_s, self.started_s, self.joined_s = self.first_times

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


class CacheChanges(NamedTuple):
    """Names of trace blocks that a prefix cache took in, parents first, and of those that it gave up."""

    stored: list[int]
    removed: list[int]


class PrefillReplica(SimulatedReplica):
    """Computes prompts for which decode has reserved KV."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Prompts not started yet."""

    @property
    def prompts(self) -> int:
        """Prompts that run or wait."""
        return self.load

    @property
    @abstractmethod
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, of waiting and running prompts."""

    @property
    def backlog_tokens(self) -> int:
        """The same of all prompts here, as a coordinator counts them."""
        return self.queued_tokens

    @property
    @abstractmethod
    def prefill_tokens_per_s(self) -> float:
        """As workers report it; 0 until measured."""

    @property
    def prompt_fit(self) -> PromptFit | None:
        """As workers report it; None until measured, and in closed form."""
        return None

    @property
    def lent_speedup(self) -> float:
        """As workers report it; 0 where no cores are lent."""
        return 0.0

    @property
    @abstractmethod
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds spent computing so far."""

    @abstractmethod
    def enqueue(self, request: SimulatedRequest, now_s: float) -> None:
        """Queues a prompt for which decode has reserved KV."""

    @property
    @abstractmethod
    def tells_cache(self) -> bool:
        """Whether this replica has a prefix cache of its own, whose changes the router learns."""

    @property
    @abstractmethod
    def cache_has_changed(self) -> bool:
        """Whether `take_cache_changes` has something to tell."""

    @abstractmethod
    def take_cache_changes(self) -> CacheChanges:
        """What has changed since the last call."""


class DecodeReplica(SimulatedReplica):
    """Decodes sequences, and computes prompts that are left to it."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    @abstractmethod
    def waiting_reservations(self) -> int:
        """Requests that wait for a reservation."""

    @property
    @abstractmethod
    def context_tokens(self) -> float:
        """KV tokens of the running batch and of reservations."""

    @property
    @abstractmethod
    def local_tokens(self) -> int:
        """Prompt tokens to be computed here."""

    @property
    @abstractmethod
    def step_s(self) -> float:
        """Duration of the current step, seconds; 0 when idle."""

    @property
    def prompt_fit(self) -> PromptFit | None:
        """As workers report it; None until measured, and in closed form."""
        return None

    @property
    def lent_speedup(self) -> float:
        """See PrefillReplica."""
        return 0.0

    @property
    def step_fit(self) -> DecodeStepFit | None:
        """The same for decode steps."""
        return None

    @abstractmethod
    def produced(self, now_s: float) -> Iterator[tuple[SimulatedRequest, int]]:
        """Running sequences with their output tokens so far."""

    @abstractmethod
    def reserve(self, request: SimulatedRequest, now_s: float) -> None:
        """Reserves KV and a batch slot for a request, now or when they are free, in order of arrival."""

    @abstractmethod
    def prefill_here(
        self, request: SimulatedRequest, now_s: float, computed: Callable[[float], None]
    ) -> None:
        """Computes the prompt of a request that has its reservation. Calls `computed` with the time when it is."""

    @abstractmethod
    def join(self, request: SimulatedRequest, now_s: float) -> None:
        """Adds a sequence to the batch: its KV is here and its first token is known."""

    @abstractmethod
    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """Releases the reservation of a request that never ran here."""
