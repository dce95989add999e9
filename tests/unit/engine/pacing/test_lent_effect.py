"""What lent cores are seen to bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pacing.lent_effect import PRIOR, LentEffect, SteadySpeed


@given(st.floats(0.0, 1.0), st.floats(1.2, 4.0), st.floats(1e-4, 1.0))
def test_steps_with_and_without_tell_it(share: float, compute: float, alone_s: float) -> None:
    effect = LentEffect()
    for _ in range(200):
        assert effect.speedup("size", alone_s, 1.0) == 1.0
        effect.speedup("size", alone_s / (1 + share * (compute - 1)), compute)
    assert effect.share == pytest.approx(share, abs=0.01)


def test_sizes_are_not_compared_with_each_other() -> None:
    effect = LentEffect()
    for _ in range(50):
        effect.speedup(1, 0.010, 1.0)
        assert effect.speedup(2, 0.020, 2.0) == 1 + PRIOR
    assert effect.share == PRIOR


def test_what_is_slower_with_lent_cores_counts_for_no_gain() -> None:
    effect = LentEffect()
    for _ in range(200):
        effect.speedup(1, 0.010, 1.0)
        speedup = effect.speedup(1, 0.015, 2.0)
    assert speedup == pytest.approx(1.0, abs=1e-3)


def test_a_few_steps_decide_nothing() -> None:
    effect = LentEffect()
    for _ in range(3):
        effect.speedup(1, 0.010, 1.0)
        effect.speedup(1, 0.010, 2.0)
    assert effect.share == PRIOR


def test_a_mean_of_steps_with_and_without_counts_in_part() -> None:
    speed = SteadySpeed()
    assert speed.value == 1.0
    for _ in range(2000):
        speed.record(0.02, 2.0)
        speed.record(0.04, 1.0)
    # Per pair 60 ms for 80 ms of work.
    assert speed.value == pytest.approx(1 + 0.6 / 3, abs=0.01)


def test_what_is_lent_no_more_is_forgotten_soon_and_what_is_lent_again_is_trusted_late() -> None:
    speed = SteadySpeed()
    for _ in range(2000):
        speed.record(0.02, 1.5)
    assert speed.value == pytest.approx(1.3)
    for _ in range(100):  # 3 s
        speed.record(0.03, 1.0)
    assert speed.value < 1.1
    for _ in range(500):
        speed.record(0.03, 1.0)
    for _ in range(100):  # 2 s
        speed.record(0.02, 1.5)
    assert 1.0 < speed.value < 1.1
