"""Blocks are read as far as that makes the first token come sooner."""

from __future__ import annotations

import random

import pytest

from engine.pacing.step_time_fit import PromptFit
from engine.tiers.read_choice import (
    PrefixBelow,
    ReadRate,
    TierName,
    choose_read,
    spared_by_more,
)

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


def transferred_s(
    tiers: list[TierName], rates: dict[TierName, ReadRate], waits_s: dict[TierName, float], total: int
) -> float:
    """Seconds until a prompt of so many blocks is there, each number of these read; a second a transferred block."""
    best_s = float(total)
    for count in range(1, len(tiers) + 1):
        ends = [
            waits_s[name] + tiers[:count].count(name) * rates[name].block_s for name in set(tiers[:count])
        ]
        best_s = min(best_s, max(ends) + total - count)
    return best_s


@pytest.mark.parametrize("seed", range(200))
def test_what_more_blocks_spare_is_what_trying_each_number_of_them_says(seed: int) -> None:
    pick = random.Random(seed)
    known: list[TierName] = pick.choices(
        ["host", "disk"], weights=[4, pick.random() * 4], k=pick.randrange(9)
    )
    rates: dict[TierName, ReadRate] = {
        "host": ReadRate(pick.choice([0.1, 0.9, 2.0, 5.0])),
        "disk": ReadRate(pick.choice([0.0, 5e-324, 0.3, 0.99, 1.0, 1.5, 3.0])),
    }
    waits_s: dict[TierName, float] = {
        "host": pick.random() * 9,
        "disk": pick.choice([0.0, pick.random() * 9]),
    }
    more = pick.randrange(1, 30)
    total = len(known) + more
    alone_s = transferred_s(known, rates, waits_s, total)
    both_s = transferred_s([*known, *["disk"] * more], rates, waits_s, total)
    assert spared_by_more(known, more, rates, waits_s, 1.0) == pytest.approx(alone_s - both_s, abs=1e-9)


class CountingRates(dict[TierName, ReadRate]):
    count = 0

    def __getitem__(self, name: TierName) -> ReadRate:
        self.count += 1
        return super().__getitem__(name)


def test_what_more_blocks_spare_costs_no_more_for_many_of_them() -> None:
    counts = []
    for more in (1, 8192):
        rates = CountingRates(host=ReadRate(0.5), disk=ReadRate(0.5))
        assert spared_by_more(["host", "disk"], more, rates, {}, 1.0) > 0
        counts.append(rates.count)
    assert counts[0] == counts[1]
