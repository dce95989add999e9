"""One look through a long queue of prompts, a part at a time: who may still be in time, and which of the others are few
enough to be known. Pure; times are seconds on one clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class WaitingPrompt(Protocol):
    """A prompt in a queue."""

    place: int
    """Its place in the order of arrival."""
    first_due_s: float
    """When its first token is due; infinity for never."""

    @property
    def arrival(self) -> int:
        """Its number in the order of arrival."""

    @property
    def uncached_tokens(self) -> int:
        """Tokens that are to be computed for it."""

    @property
    def has_own_output(self) -> bool:
        """Whether its answer was interrupted, so that a client waits in the middle of it."""


W = TypeVar("W", bound=WaitingPrompt)


def may_be_in_time(prompt: WaitingPrompt, token_s: float, now: float) -> bool:
    """Whether a prompt keeps a place among those that can be in time, at so many seconds a token at least."""
    due_s = prompt.first_due_s
    return now + token_s * prompt.uncached_tokens < due_s < math.inf or prompt.has_own_output


@dataclass(slots=True)
class SeenClass(Generic[W]):
    """What a scan has seen of one class so far. Who has left since is still in it."""

    kept: int
    count: int = 0
    """How many were looked at."""
    has_due_time: bool = False
    """Whether any of them has one."""
    possible: list[W] = field(default_factory=list)
    """Those that may be in time, in order of places, interrupted answers first; at most `kept`."""
    aside: list[W] = field(default_factory=list)
    """The others, the smallest first; at most `kept`."""
    oldest_aside: W | None = None
    """The first of the others to arrive."""

    def look_at(self, prompts: Sequence[W], token_s: float, now: float) -> None:
        """Takes so many prompts in. O(n + kept), and the logarithm of that."""
        self.count += len(prompts)
        possible: list[W] = []
        aside: list[W] = []
        for each in prompts:
            (possible if may_be_in_time(each, token_s, now) else aside).append(each)
            self.has_due_time |= each.first_due_s < math.inf
        if possible:
            self.possible = sorted([*self.possible, *possible], key=_by_place)[: self.kept]
        if aside:
            self.aside = sorted([*self.aside, *aside], key=_by_size)[: self.kept]
            oldest = min(aside, key=_by_arrival)
            if self.oldest_aside is None or oldest.arrival < self.oldest_aside.arrival:
                self.oldest_aside = oldest

    def narrowed(self, is_here: Callable[[W], bool], token_s: float, now: float) -> SeenClass[W]:
        """The same of those that are still here, as they are now."""
        oldest = () if self.oldest_aside is None else (self.oldest_aside,)
        known = dict.fromkeys((*self.possible, *self.aside, *oldest))
        now_seen: SeenClass[W] = SeenClass(self.kept)
        now_seen.look_at([each for each in known if is_here(each)], token_s, now)
        return now_seen

    def first(self, count: int, at_least_aside: int) -> list[W]:
        """At most `count` prompts: those that may be in time in order of places, and in any case some of the others,
        the smallest and the oldest."""
        few = min(len(self.aside), max(at_least_aside, count - len(self.possible)), count)
        others = list(self.aside[:few])
        if few and self.oldest_aside is not None and self.oldest_aside not in others:
            others[-1] = self.oldest_aside
        return [*others, *self.possible[: count - few]]


class QueueScan(Generic[W]):
    """A look through the prompts of each class, the highest first, that can be interrupted between two parts."""

    def __init__(self, classes: Mapping[int, list[W]], kept: int) -> None:
        """`classes`: the prompts by class, taken over; `kept`: how many of a class are remembered of each kind."""
        self._prompts = classes
        self.seen: dict[int, SeenClass[W]] = {rank: SeenClass(kept) for rank in classes}

    def go_on(
        self, most: int, token_s: float, now: float, refresh: Callable[[W], None] = lambda prompt: None
    ) -> bool:
        """Looks at `most` more prompts, each brought up to date by `refresh`; returns whether it has been through."""
        for rank, seen in self.seen.items():
            part = self._prompts[rank][seen.count : seen.count + most]
            if part:
                for each in part:
                    refresh(each)
                seen.look_at(part, token_s, now)
                most -= len(part)
        return all(seen.count == len(self._prompts[rank]) for rank, seen in self.seen.items())

    def add(self, rank: int, prompt: W) -> None:
        """A prompt that has come since it began, if it knows its class."""
        if rank in self.seen:
            self._prompts[rank].append(prompt)


def _by_place(prompt: WaitingPrompt) -> tuple[bool, int]:
    return not prompt.has_own_output, prompt.place


def _by_size(prompt: WaitingPrompt) -> tuple[int, int]:
    return prompt.uncached_tokens, prompt.arrival


def _by_arrival(prompt: WaitingPrompt) -> int:
    return prompt.arrival
