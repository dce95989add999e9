"""How far answers are apart: exact where it can be, never more than the true divergence, and rounding forgiven."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.quality.golden_answer import MOST_NATS, GoldenAnswer, GoldenToken, compare, divergence


def top(probabilities: dict[int, float], most: int = 20) -> dict[int, float]:
    best = sorted(probabilities.items(), key=lambda item: -item[1])[:most]
    return {token: math.log(p) for token, p in best}


def answer(*tokens: tuple[int, dict[int, float]]) -> GoldenAnswer:
    return tuple(GoldenToken(token, top(probabilities)) for token, probabilities in tokens)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def distributions() -> st.SearchStrategy[list[float]]:
    # Multiples of 1/12: nothing is as small as LEAST_PROBABILITY.
    weights = st.lists(st.integers(1, 12), min_size=12, max_size=12)
    return weights.map(lambda w: [x / sum(w) for x in w])


@given(distributions(), distributions(), st.integers(1, 12))
def test_it_is_a_lower_bound_and_exact_with_all_tokens(p: list[float], q: list[float], listed: int) -> None:
    found = divergence(top(dict(enumerate(p)), listed), top(dict(enumerate(q)), listed))
    assert -1e-9 <= found <= kl(p, q) + 1e-9
    if listed == len(p):
        assert found == pytest.approx(kl(p, q), abs=1e-9)


@given(distributions(), st.integers(1, 12))
def test_nothing_is_no_distance_from_itself(p: list[float], listed: int) -> None:
    same = top(dict(enumerate(p)), listed)
    assert divergence(same, same) == pytest.approx(0, abs=1e-9)


def test_lists_without_a_common_token_are_far_apart() -> None:
    one = top(dict.fromkeys(range(20), 0.045))
    other = top(dict.fromkeys(range(100, 120), 0.045))
    assert divergence(one, other) == pytest.approx(0.8 * math.log(9))
    sure = divergence(top({1: 0.999}), top({2: 0.999}))
    assert sure > 5


def test_what_is_not_a_number_is_as_far_as_can_be() -> None:
    assert divergence(top({1: 0.9}), {1: math.nan}) == MOST_NATS
    assert divergence(top({1: 0.9}), {1: -math.inf}) == MOST_NATS
    assert divergence({}, top({1: 0.9})) == 0


def test_positions_after_the_first_difference_are_not_compared() -> None:
    first = (1, {1: 0.9, 2: 0.1})
    reference = answer(first, (3, {3: 0.51, 4: 0.49}), (5, {5: 1.0}), (6, {6: 1.0}))
    other = answer(first, (4, {3: 0.49, 4: 0.51}), (9, {9: 1.0}), (9, {9: 1.0}))
    found = compare(reference, other)
    assert (found.agreement, round(found.swapped, 3)) == (0.25, 0.02)
    assert 0 < found.kl_nats < 0.001
    assert not found.exceeds(0.02), "two tokens that are almost equally probable changed places"


def test_a_token_that_its_own_distribution_does_not_explain_is_wrong() -> None:
    reference = answer((1, {1: 0.9, 2: 0.1}))
    found = compare(reference, answer((2, {1: 0.9, 2: 0.1})))
    assert found.kl_nats == pytest.approx(0, abs=1e-9)
    assert found.swapped == pytest.approx(0.8)
    assert found.exceeds(0.02)


def test_without_logprobs_tokens_alone_decide() -> None:
    reference = (GoldenToken(1, {}), GoldenToken(2, {}))
    assert not compare(reference, reference).exceeds(0.02)
    assert compare(reference, (GoldenToken(1, {}), GoldenToken(3, {}))).exceeds(0.02)
    assert compare(reference, (GoldenToken(1, {}),)).exceeds(0.02), "an answer that ends early"


@given(distributions(), distributions(), st.floats(1e-4, 1))
def test_no_greedy_swap_within_the_tolerance_counts(p: list[float], q: list[float], tolerance: float) -> None:
    best_p, best_q = max(range(12), key=p.__getitem__), max(range(12), key=q.__getitem__)
    found = compare(answer((best_p, dict(enumerate(p)))), answer((best_q, dict(enumerate(q)))))
    assert found.exceeds(tolerance) == (kl(p, q) > tolerance) or abs(kl(p, q) - tolerance) < 1e-9
