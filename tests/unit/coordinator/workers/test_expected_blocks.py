"""Expected prompts against a plain dict of blocks and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.workers import prefix_index
from coordinator.workers.prefix_index import LIFETIME_S, ExpectedBlocks

Prompt = tuple[int, ...]


def named(choices: list[int]) -> Prompt:
    """Keys like those of blocks: each stands for all before it."""
    keys, name = [], 1
    for choice in choices:
        name = 3 * name + choice
        keys.append(name)
    return tuple(keys)


prompts_st = st.lists(st.integers(0, 1), max_size=12).map(named)
added_st = st.lists(st.tuples(prompts_st, st.sampled_from([1, 2, 4, 6]), st.integers(0, 30)), max_size=12)


def depths(expected: ExpectedBlocks, keys: Prompt) -> dict[int, int]:
    found: dict[int, int] = {}
    for depth, key in enumerate(keys, start=1):
        for slot in range(3):
            if expected.slots(key) >> slot & 1:
                found[slot] = depth
    return found


@given(added_st, prompts_st)
def test_each_slot_is_expected_to_the_depth_that_was_sent(
    added: list[tuple[Prompt, int, int]], asked: Prompt
) -> None:
    expected, plain = ExpectedBlocks(), dict[tuple[int, int], None]()
    for keys, bits, _ in added:
        expected.add(keys, bits, 0.0)
        plain |= {(key, slot): None for key in keys for slot in range(3) if bits >> slot & 1}
    wanted = {slot: sum((key, slot) in plain for key in asked) for slot in range(3)}
    assert depths(expected, asked) == {slot: depth for slot, depth in wanted.items() if depth}


@given(added_st, st.integers(0, 60))
def test_an_expectation_counts_for_once_to_twice_its_lifetime(
    added: list[tuple[Prompt, int, int]], later: int
) -> None:
    expected, now = ExpectedBlocks(), 0
    for keys, bits, wait in added:
        now += wait
        expected.add(keys, bits, now)
    expected.expire(now + later)
    last = added[-1][0] if added else ()
    if later < LIFETIME_S:
        assert max(depths(expected, last).values(), default=0) == len(last)
    if later >= 2 * LIFETIME_S:
        assert not depths(expected, last)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_KEYS", 8)
    expected = ExpectedBlocks()
    for prompt in range(100):
        expected.add(tuple(range(100 * prompt, 100 * prompt + 4)), 1, 0.0)
    kept = [prompt for prompt in range(100) if expected.slots(100 * prompt)]
    assert kept[-1] == 99
    assert len(kept) <= 6
    expected.clear()
    assert not expected.slots(9900)
