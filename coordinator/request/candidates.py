"""What a routing policy predicted for a pair of workers, and for those that it did not choose."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.workers.snapshot import PoolName


@dataclass(frozen=True, slots=True)
class PairCost:
    """The terms of a pair's predicted cost. Times in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    others_s: float = 0.0
    """Delay that computing the prompt causes to requests behind it; not part of this request's own time."""
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    fetch_s: float = 0.0
    """Fetching what another worker's cache has more of the prompt, where that is sooner; `prefill_s` is the rest."""
    read_s: float = 0.0
    """Reading what of that lies below the prefill worker's KV blocks, beyond `queue_s`, which passes meanwhile."""
    cached_tokens: int = 0
    """Leading prompt tokens expected in the prefill worker's cache, without what is fetched."""
    decode_cached_tokens: int = 0
    """Leading prompt tokens expected in the decode worker's cache."""

    @property
    def wait_s(self) -> float:
        """Seconds until the request can be decoded."""
        own_s = self.queue_s + self.read_s + self.fetch_s + self.prefill_s
        return own_s + self.transfer_s + self.decode_wait_s


NO_COST = PairCost()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that was considered for its role, with the cost of the pair that it makes with the chosen other one."""

    worker_id: str
    pool: PoolName
    cost: PairCost
    is_home: bool = False
    """Whether it is the home of the request's session, which is preferred a little."""


@dataclass(frozen=True, slots=True)
class FetchedPrefix:
    """What was fetched from another worker's cache before an attempt. Times in seconds."""

    holder: str
    """Ids of the two workers."""
    taker: str
    tokens: int
    """Prompt tokens that the taker lacked."""
    predicted_s: float
    compute_s: float
    """What computing them was predicted to take."""
    took_s: float
    failure: str = ""
    """Reason and message; empty unless it failed, and they were computed."""
    joined: bool = False
    """Whether it was under way already, for another request."""
