"""The waiting requests of one model: the bounded queue, in order of service. Pure.

Precedence: weighted shares decide which class is next, fair shares which of its tenants. Of this tenant's requests the
next is the first by priority, then by deadline if it has one, else by arrival.

While all classes have waiting requests, they get service in the ratio 16 : 4 : 1 (interactive, standard, batch), so
none starves. A class that needs less than its share hardly waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from coordinator.request.inference_request import PriorityClass
from coordinator.request.state import Entry

CLASSES: tuple[PriorityClass, ...] = ("interactive", "standard", "batch")
"""The most urgent first."""
RANK: Mapping[PriorityClass, int] = MappingProxyType({name: rank for rank, name in enumerate(CLASSES)})

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""Service is measured in prompt tokens; an output token counts as two (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024)."""


Cause = Literal["prefill", "decode", "workers"]
"""What requests wait for: a pool's capacity, or the first workers of a pool that has none."""


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


CLASS_WEIGHTS: Mapping[PriorityClass, float] = MappingProxyType(
    {"interactive": 16.0, "standard": 4.0, "batch": 1.0}
)
K = TypeVar("K", bound=Hashable)
LOOK_AHEAD = 64
"""How many of one tenant's requests are offered per round, so that short ones can bypass long ones."""


@dataclass(eq=False, slots=True)
class FairShareCounter:
    """The service of one party, a tenant or a class."""

    weight: float
    served: float = 0.0
    """Service so far, over the weight; raised after idling."""
    waiting: int = 0
    """Requests in the queue."""

    def charge(self, cost: float) -> None:
        """Charges service of this cost."""
        self.served += cost / self.weight


class FairShare(Generic[K]):
    """Fair shares by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI'24).

    The party with the least service relative to its weight is next. Service is charged as it is given: prompts when
    they start, output tokens as they are sent. The counter of a party that returns from idling is raised to the least
    counter of the waiting parties, so that idling earns no credit. While two parties both wait, their service over
    weight never differs by more than 2 max(prompt cost of the longest prompt, output cost of all that can run at once)
    / weight (theorem 4.4). Shares are work-conserving: others use what a party leaves.

    Keeps the counters of all parties ever seen, which are bounded by their names.
    """

    def __init__(self) -> None:
        self._counters: dict[K, FairShareCounter] = {}
        self._waiting: dict[K, FairShareCounter] = {}
        self._last_left: FairShareCounter | None = None

    def counter(self, key: K, weight: float) -> FairShareCounter:
        """The party's counter, with this weight from now on."""
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = FairShareCounter(weight)
        counter.weight = weight
        return counter

    def join(self, key: K, counter: FairShareCounter) -> None:
        """Adds a waiting request of this party. The first one raises the party's counter."""
        counter.waiting += 1
        if counter.waiting > 1:
            return
        if self._waiting:
            counter.served = max(counter.served, min(other.served for other in self._waiting.values()))
        elif self._last_left is not None:
            counter.served = max(counter.served, self._last_left.served)
        self._waiting[key] = counter

    def skip(self, counter: FairShareCounter) -> None:
        """Admits a request of this party without waiting: the same as joining and leaving at once."""
        if self._last_left is not None and self._last_left is not counter:
            counter.served = max(counter.served, self._last_left.served)
        self._last_left = counter

    def leave(self, key: K, counter: FairShareCounter) -> None:
        """Removes a waiting request of this party."""
        counter.waiting -= 1
        if not counter.waiting:
            del self._waiting[key]
            self._last_left = counter

    @property
    def waiting(self) -> dict[K, FairShareCounter]:
        """Parties with requests in the queue."""
        return self._waiting


@dataclass(slots=True)
class Ahead:
    """Expected work that is served before a new request."""

    requests: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(eq=False, slots=True)
class _TenantQueue:
    """One tenant's requests of one class, in order of service."""

    counter: FairShareCounter
    entries: list[Entry] = field(default_factory=list)
    cost: float = 0.0


@dataclass(eq=False, slots=True)
class _ClassQueue:
    counter: FairShareCounter
    tenants: FairShare[str] = field(default_factory=FairShare)
    queues: dict[str, _TenantQueue] = field(default_factory=dict)
    cost: float = 0.0
    requests: int = 0


class AdmissionQueue:
    """Holds entries in order of service. Bounded in entries and in their prompt tokens."""

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests, self._max_prompt_tokens = max_requests, max_prompt_tokens
        self._shares: FairShare[PriorityClass] = FairShare()
        self._classes = {
            name: _ClassQueue(self._shares.counter(name, weight)) for name, weight in CLASS_WEIGHTS.items()
        }
        self.requests = 0
        self.prompt_tokens = 0
        self.uncached_tokens = 0.0
        self.output_tokens = 0.0

    def __len__(self) -> int:
        return self.requests

    def lengths(self) -> dict[PriorityClass, int]:
        """Number of queued requests by class."""
        return {name: self._classes[name].requests for name in CLASSES}

    def make_room(self, newcomer: Entry) -> list[Entry] | None:
        """Evicts entries until the newcomer fits, and returns them; None: the newcomer itself is to be refused.

        Victims are taken from the back of lower classes first, then, within the newcomer's class, from tenants that
        hold more of the queue relative to their weight than the newcomer's tenant would.
        """
        evicted: list[Entry] = []
        while not self._has_room(newcomer):
            victim = self._victim(newcomer)
            if victim is None:
                for entry in evicted:
                    self.add(entry)
                return None
            self.remove(victim)
            evicted.append(victim)
        return evicted

    def pass_by(self, entry: Entry) -> None:
        """Charges the prompt of an entry that is admitted without queueing, because the queue is empty."""
        class_queue = self._classes[entry.priority_class]
        queue = self._queue_of(class_queue, entry)
        self._shares.skip(class_queue.counter)
        class_queue.tenants.skip(queue.counter)
        self.charge(entry, PROMPT_TOKEN_COST * entry.prompt_tokens)

    def add(self, entry: Entry) -> None:
        """Queues an entry, regardless of the bounds."""
        class_queue = self._classes[entry.priority_class]
        queue = self._queue_of(class_queue, entry)
        insort(queue.entries, entry, key=_ORDER)
        self._shares.join(entry.priority_class, class_queue.counter)
        class_queue.tenants.join(entry.tenant, queue.counter)
        self._count(entry, class_queue, queue, 1)

    def remove(self, entry: Entry) -> None:
        """Removes an entry, whether it is served or not."""
        class_queue = self._classes[entry.priority_class]
        queue = class_queue.queues[entry.tenant]
        place = bisect_left(queue.entries, entry.order, key=_ORDER)
        assert queue.entries[place] is entry
        del queue.entries[place]
        self._shares.leave(entry.priority_class, class_queue.counter)
        class_queue.tenants.leave(entry.tenant, queue.counter)
        self._count(entry, class_queue, queue, -1)

    def serve(self, entry: Entry) -> None:
        """Removes a queued entry that is admitted, and charges its prompt."""
        self.remove(entry)
        self.charge(entry, PROMPT_TOKEN_COST * entry.prompt_tokens)

    def charge(self, entry: Entry, cost: float) -> None:
        """Charges service given to an entry, queued or not."""
        class_queue = self._classes[entry.priority_class]
        class_queue.counter.charge(cost)
        class_queue.queues[entry.tenant].counter.charge(cost)

    def offers(self) -> Iterator[Entry]:
        """The entries in order of service, the first LOOK_AHEAD of each tenant. Do not modify the queue meanwhile."""
        for name in sorted(
            self._shares.waiting, key=lambda name: (self._classes[name].counter.served, RANK[name])
        ):
            class_queue = self._classes[name]
            queues = [class_queue.queues[tenant] for tenant in class_queue.tenants.waiting]
            for queue in sorted(queues, key=lambda queue: (queue.counter.served, queue.entries[0].number)):
                yield from queue.entries[:LOOK_AHEAD]

    def ahead_of(self, newcomer: Entry) -> Ahead:
        """Expected work served before a newcomer that is not queued yet, if no further requests arrive.

        As in generalized processor sharing: while the newcomer's tenant gets service x, another tenant gets at most x
        times the ratio of their weights, plus the lead of the newcomer's counter over its own. Likewise for classes.
        """
        class_queue = self._classes[newcomer.priority_class]
        queue = class_queue.queues.get(newcomer.tenant)
        before = 0.0 if queue is None else queue.cost
        if queue is not None and queue.entries and newcomer.outranks(queue.entries[-1]):
            before = sum(_cost(entry) for entry in queue.entries if not newcomer.outranks(entry))
        own = before + _cost(newcomer)
        in_class = before
        served = queue.counter.served if queue is not None and queue.counter.waiting else 0.0
        for tenant, other in class_queue.tenants.waiting.items():
            if tenant != newcomer.tenant:
                lead = max(0.0, served - other.served) if served else 0.0
                in_class += min(
                    class_queue.queues[tenant].cost, (own / newcomer.weight + lead) * other.weight
                )
        total = in_class
        for name in self._shares.waiting:
            if name != newcomer.priority_class:
                share = CLASS_WEIGHTS[name] / CLASS_WEIGHTS[newcomer.priority_class]
                total += min(self._classes[name].cost, (in_class + _cost(newcomer)) * share)
        whole = sum(other_class.cost for other_class in self._classes.values())
        part = total / whole if whole else 0.0
        return Ahead(self.requests * part, self.uncached_tokens * part, self.output_tokens * part)

    def _queue_of(self, class_queue: _ClassQueue, entry: Entry) -> _TenantQueue:
        queue = class_queue.queues.get(entry.tenant)
        if queue is None:
            counter = class_queue.tenants.counter(entry.tenant, entry.weight)
            queue = class_queue.queues[entry.tenant] = _TenantQueue(counter)
        queue.counter.weight = entry.weight
        return queue

    def _has_room(self, newcomer: Entry) -> bool:
        if not self.requests:
            return True  # a prompt above the token bound may wait alone
        tokens = self.prompt_tokens + newcomer.prompt_tokens
        return self.requests < self._max_requests and tokens <= self._max_prompt_tokens

    def _victim(self, newcomer: Entry) -> Entry | None:
        for name in reversed(CLASSES[RANK[newcomer.priority_class] + 1 :]):
            queues = [queue for queue in self._classes[name].queues.values() if queue.entries]
            if queues:
                return max(queues, key=_holding).entries[-1]
        class_queue = self._classes[newcomer.priority_class]
        own = class_queue.queues.get(newcomer.tenant)
        would_hold = ((own.cost if own else 0.0) + _cost(newcomer)) / newcomer.weight
        others = [
            queue
            for tenant, queue in class_queue.queues.items()
            if tenant != newcomer.tenant and queue.entries
        ]
        if others:
            most = max(others, key=_holding)
            if _holding(most) > would_hold:
                return most.entries[-1]
        if own is not None and own.entries and newcomer.outranks(own.entries[-1]):
            return own.entries[-1]
        return None

    def _count(self, entry: Entry, class_queue: _ClassQueue, queue: _TenantQueue, sign: int) -> None:
        class_queue.requests += sign
        self.requests += sign
        self.prompt_tokens += sign * entry.prompt_tokens
        self.uncached_tokens += sign * entry.uncached_tokens
        self.output_tokens += sign * entry.expected_output
        # Reset at empty, so that rounding errors do not accumulate.
        queue.cost = queue.cost + sign * _cost(entry) if queue.entries else 0.0
        class_queue.cost = class_queue.cost + sign * _cost(entry) if class_queue.requests else 0.0
        if not self.requests:
            self.uncached_tokens = self.output_tokens = 0.0


_ORDER = attrgetter("order")


def _cost(entry: Entry) -> float:
    """Expected service, in prompt tokens."""
    return PROMPT_TOKEN_COST * entry.prompt_tokens + OUTPUT_TOKEN_COST * entry.expected_output


def _holding(queue: _TenantQueue) -> float:
    return queue.cost / queue.counter.weight
