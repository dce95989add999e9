"""A request as admission sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coordinator.caller import PriorityClass
from coordinator.pools import WorkerKey

CLASSES: tuple[PriorityClass, ...] = ("interactive", "standard", "batch")
"""The most urgent one first."""
RANK: Mapping[PriorityClass, int] = MappingProxyType({name: rank for rank, name in enumerate(CLASSES)})

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""Service is counted in prompt tokens; an output token counts as two (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024)."""
NOT_HELD = (0.0, 0.0)
_OUTLIVED_SHARE = 0.5


@dataclass(eq=False, slots=True)
class Entry:
    """One request between its arrival and its end. Compared by identity. Times are on one monotonic clock."""

    request_id: str
    tenant: str
    weight: float
    """Of the tenant."""
    priority_class: PriorityClass
    priority: int
    """Order among the requests of one tenant and class: higher first."""
    prompt_tokens: int
    uncached_tokens: float
    """Those of them that are expected to need computing."""
    expected_output: float
    max_output: int
    needs_decode: bool
    arrived_s: float
    deadline_s: float
    """When the request ends by itself."""
    number: int = 0
    """Running number of arrivals; below 0 once the request is over."""
    bypassed: int = 0
    """How many later ones were let past this one because it did not fit."""
    predicted_ttft_s: float = 0.0
    """As of its arrival, uncorrected; 0: not predicted."""
    start_by_s: float = float("inf")
    """When waiting in the queue ends with a refusal."""
    sent: int = 0
    """Output tokens so far."""
    computed: bool = False
    """Whether its prompt has been computed: the first token was sent."""
    started: bool = False
    """Whether it has left the queue towards the workers."""
    prefill: WorkerKey | None = None
    decode: WorkerKey | None = None
    """The workers that it is counted at."""
    marks: tuple[float, float] = NOT_HELD
    """Seconds that the queue had been held up by prefill and by decode when it came in; when it left, since then."""

    @property
    def order(self) -> tuple[int, int]:
        """Place among the requests of its tenant and class."""
        return -self.priority, self.number

    @property
    def cost(self) -> float:
        """Service that it is expected to get."""
        return PROMPT_TOKEN_COST * self.prompt_tokens + OUTPUT_TOKEN_COST * self.expected_output

    @property
    def context_tokens(self) -> int:
        """KV tokens that it holds on its decode worker."""
        return self.prompt_tokens + self.sent

    @property
    def remaining_output(self) -> float:
        """Output tokens that are still expected. One that has outlived its expectation is expected to go on for half as
        long again."""
        left = self.expected_output - self.sent
        if left < 1.0:
            left = _OUTLIVED_SHARE * self.expected_output
        return max(0.0, min(left, self.max_output - self.sent))
