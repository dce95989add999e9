"""What a worker could get of a prefix from the one that holds most of it: counted when workers are chosen. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.workers.snapshot import Worker, WorkerKey

MARGIN = 0.75
"""Of the time that computing takes: as long may a fetch be predicted to take. A prediction that is 25% too low still
finds the prefix sooner than it would have been computed: 0.75 x 1.25 < 1."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class PrefixOffer:
    """The leading `tokens` of a prompt, which `holder` has. Times in seconds."""

    holder: Worker
    tokens: int
    fixed_s: float
    """Of any fetch from there: calls, and what waits there."""
    pace: float
    """Of a lane, over what its probe says."""
    resting: frozenset[WorkerKey] = frozenset()
    """Workers that do not fetch from there now."""

    def may_go_to(self, taker: Worker) -> bool:
        """Whether a worker could take it, if the lane to it is measured."""
        if not taker.takes_prefixes or taker.key == self.holder.key or taker.key in self.resting:
            return False
        return taker.agent_id in self.holder.reached_agents

    def fetch_s(self, taker: Worker, held: int) -> float | None:
        """Of the tokens after those that a worker holds; None if there are none, or it cannot take them."""
        if self.tokens <= held or not self.may_go_to(taker) or not has_room(taker, self.tokens - held):
            return None
        lane_s = lane_seconds(self.holder, taker, self.tokens - held)
        return None if lane_s is None else self.fixed_s + self.pace * lane_s

    def sooner_s(self, taker: Worker, held: int, compute_s: float) -> float | None:
        """The same, if that is by `MARGIN` sooner than computing them in `compute_s`."""
        fetch_s = self.fetch_s(taker, held)
        return fetch_s if fetch_s is not None and fetch_s <= MARGIN * compute_s else None


def has_room(taker: Worker, tokens: int) -> bool:
    """Whether a worker would take so many; requests' own reservations go first there."""
    load = taker.load
    if load.running_requests >= taker.max_running_requests or load.waiting_reservations:
        return False
    return load.free_blocks * taker.block_size_tokens >= tokens


def lane_seconds(holder: Worker, taker: Worker, tokens: int) -> float | None:
    """Seconds in which the lane alone carries the KV of `tokens`; None if it is not measured, or refused."""
    return lane_seconds_of_bytes(holder, taker, tokens * token_bytes(taker))


def lane_seconds_of_bytes(holder: Worker, taker: Worker, size: float) -> float | None:
    """The same of `size` bytes."""
    lane = next((lane for lane in holder.lanes if lane.agent_id == taker.agent_id), None)
    if lane is None or lane.refused or lane.gb_per_second <= 0:
        return None
    return lane.latency_ms / 1e3 + size / (lane.gb_per_second * _GB)


def token_bytes(worker: Worker) -> float:
    """Bytes of KV of a token."""
    return worker.block_bytes / max(1, worker.block_size_tokens)
