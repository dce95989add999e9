"""What a new worker is seeded with: prefixes that are found often, within a bound, the old ones forgotten."""

from __future__ import annotations

import pytest

from coordinator.peer_fetch.hot_prefixes import HALF_LIFE_S, HotPrefixes, Prefix
from splitserve.generation.kv_blocks import Adapter


def found(hot: HotPrefixes, key: int, tokens: int, times: int, now: float = 0.0, model: str = "m") -> None:
    for _ in range(times):
        hot.found(key, Prefix(model, [key] * (tokens + 5), b"s"), tokens, now)


def keys(hot: HotPrefixes, count: int = 9, now: float = 0.0, models: tuple[str, ...] = ("m",)) -> list[int]:
    return [prefix.token_ids[0] for prefix in hot.hottest(models, count, now)]


def test_the_hottest_spare_the_most_computing() -> None:
    hot = HotPrefixes()
    found(hot, 1, 16, 9)
    found(hot, 2, 160, 2)
    found(hot, 3, 320, 4)
    found(hot, 4, 320, 9, model="other")
    assert keys(hot) == [3, 2, 1]
    assert keys(hot, 2) == [3, 2]
    assert keys(hot, models=("m", "other")) == [4, 3, 2, 1]
    (first,) = hot.hottest(["m"], 1, 0.0)
    assert len(first.token_ids) == 320
    assert first.cache_salt == b"s"


def test_what_was_found_once_or_long_ago_is_left_out() -> None:
    hot = HotPrefixes()
    found(hot, 1, 16, 1)
    found(hot, 2, 16, 2)
    assert keys(hot) == [2]
    assert keys(hot, now=HALF_LIFE_S) == []
    found(hot, 2, 16, 1, now=HALF_LIFE_S)
    assert keys(hot, now=HALF_LIFE_S) == [2]


def test_memory_is_bounded_and_the_least_recently_found_are_forgotten() -> None:
    hot = HotPrefixes(max_tokens=100)
    found(hot, 1, 40, 2)
    found(hot, 2, 40, 2)
    found(hot, 1, 40, 1)
    found(hot, 3, 40, 2)
    assert sorted(keys(hot)) == [1, 3]
    found(hot, 4, 101, 5)
    assert sorted(keys(hot)) == [1, 3], "one that is too long replaces nothing"


@pytest.mark.parametrize("adapter", [None, Adapter("a", "f" * 64)])
def test_a_prefix_keeps_whose_it_is(adapter: Adapter | None) -> None:
    hot = HotPrefixes()
    for _ in range(2):
        hot.found(7, Prefix("m", (1, 2, 3), b"tenant", adapter), 2, 0.0)
    (kept,) = hot.hottest(["m"], 1, 0.0)
    assert (list(kept.token_ids), kept.cache_salt, kept.adapter) == ([1, 2], b"tenant", adapter)
