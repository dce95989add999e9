"""What lent cores are seen to bring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pacing.lent_effect import PRIOR, LentEffect


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
