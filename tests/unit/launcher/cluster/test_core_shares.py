"""Cores are distributed without overlap and evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.placement import CoreShare, layout_cores, unpinned_cores
from splitserve.core_list import format_cores, parse_cores
from splitserve.errors import InvalidArgumentError

CORES = st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True)


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([0], 2, [(0,), (0,)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([2, 5], 3, [(2,), (5,), (2,)]),
        ([0, 1, 2], 2, [(0, 1), (2,)]),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3)]),
        (list(range(16)), 2, [tuple(range(7)), tuple(range(7, 14))]),
        (list(range(9)), 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_known_layouts(cores: list[int], workers: int, expected: list[tuple[int, ...]]) -> None:
    assert layout_cores(cores, workers) == [CoreShare(cpus, len(cpus)) for cpus in expected]


@given(CORES, st.integers(1, 80))
def test_layouts_hold_their_promises(cores: list[int], workers: int) -> None:
    shares = layout_cores(cores, workers)
    used = [cpu for share in shares for cpu in share.cpus]
    sizes = {len(share.cpus) for share in shares}
    assert len(shares) == workers
    assert set(used) <= set(cores)
    assert all(share.cpus and share.threads == len(share.cpus) for share in shares)
    assert max(sizes) - min(sizes) <= 1
    if workers <= len(cores):
        assert len(set(used)) == len(used)
    if len(cores) > 2 * workers:
        assert len(used) < len(cores)
        assert len(sizes) == 1
    else:
        assert set(used) == set(cores)


def test_unpinned_workers_share_the_threads() -> None:
    assert unpinned_cores([0, 1, 2, 3, 4], 2) == [CoreShare((), 2)] * 2
    assert unpinned_cores([0], 3) == [CoreShare((), 1)] * 3


@given(CORES)
def test_cores_are_read_as_written(cores: list[int]) -> None:
    assert parse_cores(format_cores(cores)) == tuple(sorted(cores))


def test_cores_are_written_shortly() -> None:
    assert format_cores([3, 0, 1, 2, 6]) == "0-3,6"
    assert parse_cores("0, 1,4-6") == (0, 1, 4, 5, 6)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999"])
def test_bad_cores_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cpus"):
        parse_cores(text)


@pytest.mark.parametrize(("cores", "workers"), [([], 1), ([0], 0)])
def test_impossible_layouts_are_refused(cores: list[int], workers: int) -> None:
    with pytest.raises(InvalidArgumentError):
        layout_cores(cores, workers)
