"""The bounded queue of one model: classes by weighted share, tenants within a class by fair share. Pure.

Shares of the classes are 16 : 4 : 1 (interactive, standard, batch) of the service while all of them wait, so none
starves; whoever asks for less than its share hardly waits at all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType

from coordinator.admission.entry import CLASSES, RANK, Entry
from coordinator.admission.fair_share import Account, FairShare
from coordinator.caller import PriorityClass

CLASS_WEIGHTS: Mapping[PriorityClass, float] = MappingProxyType(
    {"interactive": 16.0, "standard": 4.0, "batch": 1.0}
)
LOOK_AHEAD = 64
"""How many of one tenant's requests are offered a round, so that long ones let short ones past."""


@dataclass(slots=True)
class Ahead:
    """What will be served before a newcomer, in expectation."""

    requests: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(eq=False, slots=True)
class _Line:
    """One tenant's requests of one class, in order of service."""

    account: Account
    entries: list[Entry] = field(default_factory=list)
    cost: float = 0.0


@dataclass(eq=False, slots=True)
class _Class:
    account: Account
    tenants: FairShare[str] = field(default_factory=FairShare)
    lines: dict[str, _Line] = field(default_factory=dict)
    cost: float = 0.0
    requests: int = 0


class AdmissionQueue:
    """Holds entries until they are taken; says in which order. Bounds are on entries and on their prompt tokens."""

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests, self._max_prompt_tokens = max_requests, max_prompt_tokens
        self._shares: FairShare[PriorityClass] = FairShare()
        self._classes = {
            name: _Class(self._shares.account(name, weight)) for name, weight in CLASS_WEIGHTS.items()
        }
        self.requests = 0
        self.prompt_tokens = 0
        self.uncached_tokens = 0.0
        self.output_tokens = 0.0

    def __len__(self) -> int:
        return self.requests

    def lengths(self) -> dict[PriorityClass, int]:
        """Requests that wait, by class."""
        return {name: self._classes[name].requests for name in CLASSES}

    def make_room(self, newcomer: Entry) -> list[Entry] | None:
        """Whom to refuse so that the newcomer can wait, already taken out; None: the newcomer itself.

        Room is taken from the back of lower classes first, then, in the newcomer's own class, from tenants that hold
        more of the queue for their weight than the newcomer's tenant would.
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
        """An entry goes on without waiting, for the queue is empty."""
        of_class = self._classes[entry.priority_class]
        line = self._line(of_class, entry)
        self._shares.passes(of_class.account)
        of_class.tenants.passes(line.account)

    def add(self, entry: Entry) -> None:
        """Queues an entry, whatever the bounds."""
        of_class = self._classes[entry.priority_class]
        line = self._line(of_class, entry)
        insort(line.entries, entry, key=_ORDER)
        self._shares.joins(entry.priority_class, of_class.account)
        of_class.tenants.joins(entry.tenant, line.account)
        self._count(entry, of_class, line, 1)

    def remove(self, entry: Entry) -> None:
        """Takes an entry out, whether it is served or not."""
        of_class = self._classes[entry.priority_class]
        line = of_class.lines[entry.tenant]
        place = bisect_left(line.entries, entry.order, key=_ORDER)
        assert line.entries[place] is entry
        del line.entries[place]
        self._shares.leaves(entry.priority_class, of_class.account)
        of_class.tenants.leaves(entry.tenant, line.account)
        self._count(entry, of_class, line, -1)

    def charge(self, entry: Entry, cost: float) -> None:
        """Counts service that an entry got, now or after it has left the queue."""
        of_class = self._classes[entry.priority_class]
        of_class.account.charge(cost)
        of_class.lines[entry.tenant].account.charge(cost)

    def offers(self) -> Iterator[Entry]:
        """The entries in order of service: the first few of every tenant that waits. Do not change the queue
        meanwhile."""
        for name in sorted(self._shares.waiting, key=self._class_key):
            of_class = self._classes[name]
            lines = [of_class.lines[tenant] for tenant in of_class.tenants.waiting]
            lines.sort(key=_line_key)
            for line in lines:
                yield from line.entries[:LOOK_AHEAD]

    def ahead_of(self, newcomer: Entry) -> Ahead:
        """What is served before a newcomer that is not in the queue yet, were nothing more to come.

        As in generalized processor sharing: while its own tenant's x is served, another one gets at most x by the
        ratio of their weights, plus the lead that the newcomer's counter has; classes likewise.
        """
        of_class = self._classes[newcomer.priority_class]
        line = of_class.lines.get(newcomer.tenant)
        before = 0.0
        if line is not None:
            last = line.entries[-1] if line.entries else None
            if last is not None and newcomer.priority > last.priority:
                before = sum(e.cost for e in line.entries if e.priority >= newcomer.priority)
            else:
                before = line.cost
        own = before + newcomer.cost
        in_class = before
        served = line.account.served if line is not None and line.account.waiting else 0.0
        for tenant, other in of_class.tenants.waiting.items():
            if tenant != newcomer.tenant:
                lead = max(0.0, served - other.served) if served else 0.0
                in_class += min(of_class.lines[tenant].cost, (own / newcomer.weight + lead) * other.weight)
        total = in_class
        for name in self._shares.waiting:
            if name != newcomer.priority_class:
                share = CLASS_WEIGHTS[name] / CLASS_WEIGHTS[newcomer.priority_class]
                total += min(self._classes[name].cost, (in_class + newcomer.cost) * share)
        whole = sum(each.cost for each in self._classes.values())
        part = total / whole if whole else 0.0
        return Ahead(self.requests * part, self.uncached_tokens * part, self.output_tokens * part)

    def _line(self, of_class: _Class, entry: Entry) -> _Line:
        line = of_class.lines.get(entry.tenant)
        if line is None:
            account = of_class.tenants.account(entry.tenant, entry.weight)
            line = of_class.lines[entry.tenant] = _Line(account)
        line.account.weight = entry.weight
        return line

    def _has_room(self, newcomer: Entry) -> bool:
        if not self.requests:
            return True  # a prompt beyond the bound on tokens waits alone
        tokens = self.prompt_tokens + newcomer.prompt_tokens
        return self.requests < self._max_requests and tokens <= self._max_prompt_tokens

    def _victim(self, newcomer: Entry) -> Entry | None:
        for name in reversed(CLASSES[RANK[newcomer.priority_class] + 1 :]):
            lines = [line for line in self._classes[name].lines.values() if line.entries]
            if lines:
                return max(lines, key=_holding).entries[-1]
        of_class = self._classes[newcomer.priority_class]
        own = of_class.lines.get(newcomer.tenant)
        would_hold = ((own.cost if own else 0.0) + newcomer.cost) / newcomer.weight
        others = [
            line for tenant, line in of_class.lines.items() if tenant != newcomer.tenant and line.entries
        ]
        if others:
            most = max(others, key=_holding)
            if _holding(most) > would_hold:
                return most.entries[-1]
        if own is not None and own.entries and own.entries[-1].priority < newcomer.priority:
            return own.entries[-1]
        return None

    def _class_key(self, name: PriorityClass) -> tuple[float, int]:
        return self._classes[name].account.served, RANK[name]

    def _count(self, entry: Entry, of_class: _Class, line: _Line, sign: int) -> None:
        of_class.requests += sign
        self.requests += sign
        self.prompt_tokens += sign * entry.prompt_tokens
        self.uncached_tokens += sign * entry.uncached_tokens
        self.output_tokens += sign * entry.expected_output
        # No rounding error outlives the last of them.
        line.cost = line.cost + sign * entry.cost if line.entries else 0.0
        of_class.cost = of_class.cost + sign * entry.cost if of_class.requests else 0.0
        if not self.requests:
            self.uncached_tokens = self.output_tokens = 0.0


_ORDER = attrgetter("order")


def _line_key(line: _Line) -> tuple[float, int]:
    return line.account.served, line.entries[0].number


def _holding(line: _Line) -> float:
    return line.cost / line.account.weight
