"""Blocks are read as far as that makes the first token come sooner."""

from __future__ import annotations

import pytest

from engine.pacing.step_time_fit import PromptFit
from engine.tiers.read_choice import PrefixBelow, ReadRate, TierName, choose_read

FIT = PromptFit(0.01, 0.001, 0.0)
"""A block of 16 tokens takes 16 ms to compute."""


def choose(
    tiers: list[TierName], host_s: float = 0.001, disk_s: float = 0.01, *, host_wait_s: float = 0.0
) -> int:
    rates: dict[TierName, ReadRate] = {"host": ReadRate(host_s), "disk": ReadRate(disk_s)}
    prefix = PrefixBelow(tokens=400, block_tokens=16, pool_blocks=2, tiers=tiers)
    return choose_read(prefix, rates, {"host": host_wait_s}, FIT)


def test_everything_is_read_where_that_is_sooner() -> None:
    assert choose(["host"] * 10 + ["disk"] * 5) == 15


def test_nothing_is_read_where_computing_is_sooner() -> None:
    assert choose(["host"] * 10, host_s=0.02) == 0
    assert choose(["host"] * 10, host_wait_s=0.5) == 0


def test_a_slow_disk_ends_the_read() -> None:
    assert choose(["host"] * 10 + ["disk"] * 5, disk_s=0.05) == 10


def test_tiers_read_at_the_same_time() -> None:
    # The disk's five blocks take 80 ms, in which the host's are read, too: 95 ms of 240 ms.
    assert choose(["host"] * 10 + ["disk"] * 5, host_s=0.008, disk_s=0.016) == 15


def test_everything_is_read_while_computing_was_not_measured() -> None:
    rates: dict[TierName, ReadRate] = {"host": ReadRate(10.0)}
    assert choose_read(PrefixBelow(100, 16, 0, ["host"] * 6), rates, {}, None) == 6


def test_a_rate_follows_its_reads_and_forgets_them() -> None:
    rate = ReadRate(0.001)
    rate.measured(10, 1.0)
    assert 0.001 < rate.block_s < 0.1
    for _ in range(30):
        rate.measured(10, 1.0)
    assert rate.block_s == pytest.approx(0.1, rel=0.01)
    rate.measured(0, 5.0)
    for _ in range(300):
        rate.passed_over()
    assert rate.block_s == pytest.approx(0.001, rel=0.5)
