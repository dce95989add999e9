"""Rests between steps for a neighbour's sake: no stream that decoding alone keeps in time is late through them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pacing.lending import (
    AGAIN_S,
    LOOK_S,
    MAX_REST_S,
    MIN_REST_S,
    RETURN_S,
    STEP_TIMES,
    UNUSED_S,
    StepLending,
    spare_until_s,
)
from engine.pacing.token_clock import MAX_GAP_S, StreamPace, TokenClock

ROUNDING_S = 1e-6
STEP_S = 0.0125


@dataclass
class Owner:
    """A worker that decodes, and what its neighbour wants. Real steps take `factor` times what is predicted, and those
    after a rest what it takes to get the cores back, too."""

    step_s: float = STEP_S
    sequence_s: float = 0.0
    factor: float = 1.0
    now: float = 100.0
    wanted: bool = True
    uses: bool = True
    streams: list[StreamPace] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    rested_s: float = 0.0
    longest_rest_s: float = 0.0

    def __post_init__(self) -> None:
        self.clock = TokenClock()
        self.count = 0
        self.lending = StepLending(self.demand, self.spare_until_s)

    def demand(self) -> int | None:
        self.count += self.uses
        return self.count if self.wanted else None

    @property
    def predicted_s(self) -> float:
        return self.step_s + self.sequence_s * len(self.streams)

    def spare_until_s(self, now: float) -> float:
        return spare_until_s(now, self.streams, self.clock, self.predicted_s)

    def join(self, tpot_s: float) -> None:
        self.streams.append(StreamPace(tpot_s, self.now, self.now))
        self.times.append([self.now])

    def step(self, late_s: float = 0.0) -> None:
        self.lending.end()
        self.now += self.factor * self.predicted_s + late_s
        for stream, times in zip(self.streams, self.times, strict=True):
            stream.emitted(self.now)
            times.append(self.now)

    def rest(self, at_most: int = 1000) -> float:
        """Rests for as long as it may, or so many looks; returns how long."""
        began_s = self.now
        for _ in range(at_most):
            if not self.lending.rests(self.now):
                break
            self.now = self.lending.next_look_s
        self.rested_s += self.now - began_s
        self.longest_rest_s = max(self.longest_rest_s, self.now - began_s)
        return self.now - began_s

    def turn(self) -> None:
        """A rest, if there is one, and a step."""
        rested = self.lending.begin(self.now)
        if rested:
            self.rest()
        self.step(RETURN_S if rested else 0.0)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tpots_s=st.lists(st.floats(0.01, 0.2), min_size=1, max_size=6),
    factor=st.sampled_from([1 / 1.5, 0.8, 1.0, 1.2, 1.5]),
    step_s=st.floats(0.002, 0.03),
    sequence_s=st.floats(0.0, 0.003),
)
def test_no_stream_is_late_that_decoding_alone_keeps_in_time(
    seed: int, tpots_s: list[float], factor: float, step_s: float, sequence_s: float
) -> None:
    pick = random.Random(seed)
    slowest_s = step_s + sequence_s * len(tpots_s)
    in_time = [max(tpot_s, factor * slowest_s + RETURN_S) for tpot_s in tpots_s]
    owner = Owner(step_s, sequence_s, factor)
    owner.join(in_time[0])
    others = in_time[1:]
    for _ in range(150):
        owner.wanted = pick.random() < 0.75
        rested = owner.lending.begin(owner.now)
        if rested:
            owner.rest(pick.randint(1, 60))
        if others and pick.random() < 0.1:
            owner.join(others.pop())  # its handoff arrived, in the middle of a rest or after a step
            owner.rest()
        owner.step(RETURN_S if rested else 0.0)
    for stream, times in zip(owner.streams, owner.times, strict=True):
        for count, now in enumerate(times):
            assert now - times[0] <= stream.tpot_s * count + ROUNDING_S
        longest_s = factor * slowest_s + RETURN_S + MAX_REST_S + ROUNDING_S
        assert max((b - a for a, b in pairwise(times)), default=0.0) <= min(longest_s, MAX_GAP_S)
    assert owner.longest_rest_s <= MAX_REST_S + ROUNDING_S


@pytest.mark.parametrize(("factor", "share"), [(1.0, 0.6), (1.5, 0.45), (1 / 1.5, 0.7)])
def test_a_stream_leaves_most_of_the_time_to_a_neighbour(factor: float, share: float) -> None:
    owner = Owner(factor=factor)
    owner.join(0.05)
    for _ in range(200):
        owner.turn()
    assert owner.rested_s / (owner.now - 100) > share


def test_nobody_waits_for_a_neighbour_that_wants_nothing() -> None:
    owner = Owner(wanted=False)
    owner.join(0.05)
    for _ in range(100):
        owner.turn()
    assert owner.now - 100 == pytest.approx(100 * STEP_S)


def test_what_was_gained_on_the_target_is_lent_in_pieces() -> None:
    owner = Owner(wanted=False)
    owner.join(0.05)
    for _ in range(100):
        owner.turn()
    owner.wanted = True
    assert owner.lending.begin(owner.now)
    assert owner.rest() == pytest.approx(MAX_REST_S)
    owner.step()
    assert owner.lending.begin(owner.now)


def test_a_rest_ends_when_the_neighbour_is_done() -> None:
    owner = Owner()
    owner.join(0.5)
    assert owner.lending.begin(owner.now)
    owner.rest(3)
    owner.wanted = False
    assert owner.rest() == 0
    assert not owner.lending.begin(owner.now)
    assert owner.lending.next_look_s == float("inf")


def test_another_stream_ends_a_rest_early() -> None:
    owner = Owner()
    owner.join(0.5)
    assert owner.lending.begin(owner.now)
    owner.rest(1)
    owner.join(0.02)
    assert owner.rest() == pytest.approx(0)


def test_a_neighbour_that_computes_nothing_is_not_waited_for() -> None:
    owner = Owner(uses=False)
    owner.join(0.5)
    assert owner.lending.begin(owner.now)
    assert owner.rest() <= UNUSED_S + LOOK_S
    assert not owner.lending.begin(owner.now + 0.9 * AGAIN_S)
    owner.now += AGAIN_S
    for _ in range(10):
        owner.step()
    assert owner.lending.begin(owner.now)


def test_a_step_that_may_be_too_long_does_not_wait() -> None:
    clock = TokenClock()
    near = StreamPace(STEP_TIMES * STEP_S, 0.0, 1.0, tokens=1)
    far = StreamPace(1.0, 0.0, 1.0, tokens=100)
    assert spare_until_s(1.0, [near, far], clock, STEP_S) == 1.0
    assert spare_until_s(1.0, [far], clock, STEP_S) > 1.0 + MIN_REST_S
    assert spare_until_s(1.0, [], clock, STEP_S) == 1.0
