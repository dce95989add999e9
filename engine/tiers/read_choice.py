"""Whether to read blocks of a prefix from lower tiers, or to compute them or have them transferred: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.pacing.step_time_fit import PromptFit

TierName = Literal["host", "disk"]
_WEIGHT = 0.25
"""Of a read in the mean of those before it."""
_FORGETTING = 0.02
"""Share of the way back to the first assumption with each read that was not chosen: a disk may be slow for a while."""


class ReadRate:
    """Seconds to read a block from a tier, as measured; an assumption until then."""

    def __init__(self, assumed_s: float) -> None:
        self._assumed_s = assumed_s
        self.block_s = assumed_s

    def measured(self, blocks: int, seconds: float) -> None:
        """Takes a read of so many blocks."""
        if blocks > 0:
            self.block_s += (seconds / blocks - self.block_s) * _WEIGHT

    def passed_over(self) -> None:
        """A read was not chosen for its time."""
        self.block_s += (self._assumed_s - self.block_s) * _FORGETTING


@dataclass(frozen=True, slots=True)
class PrefixBelow:
    """A prompt whose first blocks are in the pool, and where the next ones are."""

    tokens: int
    """Of the whole prompt."""
    block_tokens: int
    pool_blocks: int
    tiers: Sequence[TierName]
    """Where each of the next blocks is."""


def choose_read(
    prefix: PrefixBelow,
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    fit: PromptFit | None,
) -> int:
    """How many of the next blocks to read, so that the prompt is computed soonest.

    Tiers read at the same time, each its blocks in order, after `waits_s` seconds of reads that were begun before. The
    prompt is computed once all have been read. Without a `fit` of computing, everything is read.
    """
    if fit is None:
        return len(prefix.tiers)
    return _soonest(prefix.tiers, rates, waits_s, lambda count: _compute_s(fit, prefix, count))[0]


def waits_for_read(
    prefix: PrefixBelow,
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    fit: PromptFit | None,
    shared: int,
    left_s: float,
) -> bool:
    """Whether a prompt waits for a read under way, which brings the first `shared` of its next blocks in `left_s`
    seconds: what else it would read, it reads then. Otherwise it chooses by itself, as `choose_read` does."""
    if fit is None:
        return True
    alone_s = _soonest(prefix.tiers, rates, waits_s, lambda count: _compute_s(fit, prefix, count))[1]
    then_s = _soonest(
        prefix.tiers[shared:],
        rates,
        dict.fromkeys(rates, left_s),
        lambda count: _compute_s(fit, prefix, shared + count) + (0.0 if count else left_s),
    )[1]
    return then_s <= alone_s


def choose_read_back(
    tiers: Sequence[TierName],
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    transfer_s: float,
) -> int:
    """How many of the next blocks to read, where a peer would transfer the others in `transfer_s` seconds each, and
    begins once all have been read."""
    return _soonest(tiers, rates, waits_s, lambda count: (len(tiers) - count) * transfer_s)[0]


def spared_by_more(
    tiers: Sequence[TierName],
    more: int,
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    transfer_s: float,
) -> float:
    """Seconds that are spared at most if so many `more` blocks after these are on the disk, too, where a peer would
    transfer a block in `transfer_s`. Costs O(tiers), however many more there are."""
    total = len(tiers) + more
    least_s = _soonest(tiers, rates, waits_s, lambda count: (total - count) * transfer_s)[1]
    block_s = rates["disk"].block_s
    nearer_s = read_seconds([each for each in tiers if each != "disk"], rates, waits_s)
    disk_s = waits_s.get("disk", 0.0) + tiers.count("disk") * block_s
    # The disk's reads of one more block each either are hidden behind the nearer tier's, or not: the least is where
    # that changes, or at the end.
    hidden = int(min(more, max(0.0, nearer_s - disk_s) / block_s)) if block_s > 0 else more
    most_s = min(
        max(nearer_s, disk_s + count * block_s) + (more - count) * transfer_s
        for count in (hidden, min(hidden + 1, more), more)
    )
    return max(0.0, least_s - most_s)


def waits_in_place_of_transfer(
    tiers: Sequence[TierName],
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    transfer_s: float,
    shared: int,
    left_s: float,
) -> bool:
    """Whether a read under way that brings `shared` of the next blocks in `left_s` seconds is waited for, where a peer
    would transfer a block in `transfer_s`; otherwise the choice is that of `choose_read_back`."""
    most = max(len(tiers), shared)
    alone_s = _soonest(tiers, rates, waits_s, lambda count: (most - count) * transfer_s)[1]
    return left_s + (most - shared) * transfer_s <= alone_s


def read_seconds(
    tiers: Sequence[TierName], rates: Mapping[TierName, ReadRate], waits_s: Mapping[TierName, float]
) -> float:
    """Seconds until all of these blocks have been read."""
    return max(
        (waits_s.get(name, 0.0) + tiers.count(name) * rates[name].block_s for name in set(tiers)), default=0.0
    )


def _soonest(
    tiers: Sequence[TierName],
    rates: Mapping[TierName, ReadRate],
    waits_s: Mapping[TierName, float],
    rest_s: Callable[[int], float],
) -> tuple[int, float]:
    """The number of blocks to read after which all is there soonest, and the seconds until then; `rest_s`: of what is
    not read, by that number."""
    best, best_s = 0, rest_s(0)
    ready_s: dict[TierName, float] = {}
    for count, tier in enumerate(tiers, start=1):
        ready_s[tier] = ready_s.get(tier, waits_s.get(tier, 0.0)) + rates[tier].block_s
        total_s = max(ready_s.values()) + rest_s(count)
        if total_s < best_s:
            best, best_s = count, total_s
    return best, best_s


def _compute_s(fit: PromptFit, prefix: PrefixBelow, read_blocks: int) -> float:
    cached = (prefix.pool_blocks + read_blocks) * prefix.block_tokens
    return fit.chunk_s(max(1, prefix.tokens - cached), cached)
