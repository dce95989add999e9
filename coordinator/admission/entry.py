"""Admission's view of a request, and its refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from coordinator.request.caller import PriorityClass
from coordinator.workers.load import Flight

CLASSES: tuple[PriorityClass, ...] = ("interactive", "standard", "batch")
"""The most urgent first."""
RANK: Mapping[PriorityClass, int] = MappingProxyType({name: rank for rank, name in enumerate(CLASSES)})

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""Service is measured in prompt tokens; an output token counts as two (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024)."""
GONE = -1
"""`Entry.number` of an entry that is neither queued nor running."""
NOT_HELD = (0.0, 0.0)
"""`Entry.marks` of a request that did not wait."""


Cause = Literal["prefill", "decode", "workers"]
"""What requests wait for: a pool's capacity, or the first workers of a pool that has none."""


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(Flight):
    """One request from arrival to end. Times are on the monotonic clock."""

    request_id: str
    tenant: str
    weight: float
    """Weight of the tenant."""
    priority_class: PriorityClass
    priority: int
    """Order among the requests of one tenant and class; higher first."""
    needs_decode: bool
    arrived_s: float
    deadline_s: float
    """When the request times out."""
    ttft_slo_s: float | None = None
    """Where it is predicted to take longer to its first token, it is refused. None: it is served late."""
    held_tokens: int | None = None
    """The longest prefix that any worker holds in any tier; None: unknown."""
    resumed: bool = False
    """Continues a stream that broke at another coordinator: its client already has a part of the answer."""
    number: int = 0
    """Arrival number; below 0 once the request is over."""
    bypassed: int = 0
    """How many later requests bypassed this one because it did not fit."""
    predicted_ttft_s: float = 0.0
    """Forecast at arrival, without bias; 0: none."""
    late: bool = False
    """Whether triage found it late at arrival."""
    learned: bool = False
    """Whether forecasts have learned from its wait."""
    start_by_s: float = float("inf")
    """When it is refused if still queued."""
    started: bool = False
    """Whether it was admitted."""
    on_host: bool = False
    """Whether a decode worker was to compute it on all cores of its host, so that it is no work of a prefill worker."""
    from_zero: bool = False
    """Whether it came while a pool had no worker, and waits for the first ones."""
    marks: tuple[float, float] = NOT_HELD
    """While queued: total seconds that the queue had waited for prefill and for decode at arrival. Once admitted:
    seconds that this request waited for each."""

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key among the requests of its tenant and class."""
        return not self.resumed, -self.priority, self.number

    @property
    def waits(self) -> bool:
        """Whether it is still to be admitted."""
        return not self.started and self.number != GONE

    def outranks(self, other: Entry) -> bool:
        """Whether it is served before another request of its tenant and class that arrived earlier."""
        return self.order[:-1] < other.order[:-1]

    @property
    def cost(self) -> float:
        """Expected service, in prompt tokens."""
        return PROMPT_TOKEN_COST * self.prompt_tokens + OUTPUT_TOKEN_COST * self.expected_output


RefusalReason = Literal["QUEUE_FULL", "WOULD_MISS_DEADLINE", "WOULD_MISS_SLO", "WAITED_TOO_LONG"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = (
    "QUEUE_FULL",
    "WOULD_MISS_DEADLINE",
    "WOULD_MISS_SLO",
    "WAITED_TOO_LONG",
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not admitted, with the client's message and retry hint."""

    entry: Entry
    reason: RefusalReason
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """The decision about a new request: it is queued unless it has started or is refused."""

    started: bool = False
    refused: Refusal | None = None
    evicted: tuple[Refusal, ...] = ()
    """Queued requests that were removed to make room for it."""


STARTED = Arrival(started=True)


@dataclass(frozen=True, slots=True)
class Release:
    """The requests that leave the queue."""

    started: tuple[Entry, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """Requests in the queue of one model, as statistics show them."""

    requests: int = 0
    uncached_tokens: float = 0.0
    cause: Cause = "prefill"
    """What they wait for."""


NOTHING_HELD = Held()
