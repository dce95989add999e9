"""Breadth-first search over all states of a system, and parts whose steps are computed once."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Counterexample(Exception):
    """A shortest way to a violation."""

    problem: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.problem, *(f"{n:3}. {step}" for n, step in enumerate(self.trace, 1))])


class Part(Protocol):
    """An object that holds production state machines; it is copied by pickling, and compared by its key."""

    def key(self) -> Hashable:
        """Equal for states that no later step can tell apart."""


P = TypeVar("P", bound=Part)


class Steps(Generic[P]):
    """The states of one part, as numbers, and its steps. Each (state, step) is computed once, by the object itself."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._pickles: list[bytes] = []
        self._facts: list[Any] = []
        self._steps: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._pickles)

    @property
    def computed(self) -> int:
        """Steps that the objects have done."""
        return len(self._steps)

    def add(self, part: P) -> int:
        """The number of a state."""
        key = part.key()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._pickles)
            self._pickles.append(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
            self._facts.append(part.facts())  # type: ignore[attr-defined]
        return number

    def facts(self, number: int) -> Any:
        """What `facts()` of the part said in this state."""
        return self._facts[number]

    def step(self, number: int, name: str, *arguments: Any) -> tuple[int, Any]:
        """The state after a method of the part was called, and what it returned."""
        assert number >= 0, "this process is down"
        call = (number, name, *arguments)
        done = self._steps.get(call)
        if done is None:
            part = pickle.loads(self._pickles[number])  # noqa: S301 - our own
            result = getattr(part, name)(*arguments)
            done = self._steps[call] = (self.add(part), result)
        return done


@dataclass(frozen=True, slots=True)
class Explored:
    """What a complete search has seen."""

    states: int
    transitions: int
    at_rest: int
    """States in which nothing can happen any more."""
    depth: int


def explore(
    start: S, successors: Callable[[S], Iterable[tuple[str, S]]], check_rest: Callable[[S], None]
) -> Explored:
    """Visits every state that can be reached. Raises Counterexample for the first violation, at its least depth.

    `successors` raises Violation where an invariant is broken. A state that follows on itself is a step without effect.
    """
    before: dict[S, tuple[S, str] | None] = {start: None}
    queue: deque[tuple[S, int]] = deque([(start, 0)])
    transitions = at_rest = depth = 0
    while queue:
        state, depth = queue.popleft()
        label, moved = "", False
        try:
            for label, following in successors(state):
                if following == state:
                    continue
                moved = True
                transitions += 1
                if following not in before:
                    before[following] = state, label
                    queue.append((following, depth + 1))
            if not moved:
                label = "at rest"
                at_rest += 1
                check_rest(state)
        except Violation as violation:
            raise Counterexample(str(violation), (*_way_to(state, before), str(violation))) from None
    return Explored(len(before), transitions, at_rest, depth)


def _way_to(state: S, before: dict[S, tuple[S, str] | None]) -> list[str]:
    labels = []
    while (step := before[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]
