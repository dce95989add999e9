"""The interface of routing policies: from a RoutingRequest to a Pair. Pure.

`coordinator.routing.prefix_router` has the default policy, `baseline_routers` the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.peer_fetch.prefix_offer import PrefixOffer
from coordinator.request.candidates import NO_COST, Candidate, PairCost
from coordinator.request.estimates import DEFAULT_OUTPUT_TOKENS
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.prefix_index import tier_reads
from coordinator.workers.prefix_index.hits import NO_HITS, PrefixHits
from coordinator.workers.snapshot import PoolName, PoolSnapshot, Worker, WorkerKey
from splitserve.errors import UnavailableError

RETRY_AFTER_S = 1.0
"""Retry hint of a coordinator that cannot serve a request now."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A routing policy's view of a request."""

    model: str
    prompt_tokens: int
    """Tokens to compute: the prompt and, on a resume, the tokens already sent."""
    needs_decode: bool = True
    """False if the answer ends with the token that prefill samples."""
    exclude: frozenset[WorkerKey] = frozenset()
    """Boots that have failed this request."""
    turn: int = 0
    """A running number that breaks ties, so that equal workers take turns."""
    hits: PrefixHits = NO_HITS
    """How much of the prompt each worker is known to hold."""
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS
    """Estimate of the remaining output."""
    session_id: str = ""
    """Requests of one session prefer the same workers; empty: no session."""
    class_rank: int = 0
    """Requests of a higher class overtake others in a worker's queue; see `CLASS_RANKS`."""
    computed_at_decode: bool = False
    """Whether the decode worker computes the prompt in any case (`local_prefill: always`), so that it waits there."""
    offer: PrefixOffer | None = None
    """What workers that lack its prefix could fetch of it; None: nothing, or nobody fetches."""
    wants_candidates: bool = False
    """Whether `Pair.candidates` is wanted."""


def cached_tokens(worker: Worker, request: RoutingRequest) -> int:
    """Leading prompt tokens that a worker does not have to compute. The last one is always computed, for its logits."""
    return min(request.hits.blocks(worker.prefix_slot) * worker.block_size_tokens, request.prompt_tokens - 1)


def held_prefix(worker: Worker, request: RoutingRequest, token_s: float) -> tuple[int, float]:
    """The same less what lies below the worker's KV blocks and is computed as soon as read, at `token_s` seconds a
    token; and the seconds until the rest has been read."""
    return tier_reads.held_prefix(worker, request.hits, request.prompt_tokens, token_s)


@dataclass(frozen=True, slots=True)
class Pair:
    """A worker that computes the prompt and, unless the request needs none, one that decodes and that it can write to.
    A neutral worker may be both."""

    prefill: Worker
    decode: Worker | None
    predicted_wait_s: float
    cost: PairCost = NO_COST
    """The terms of `predicted_wait_s`; zeros if the policy does not compute them."""
    decode_candidates: int = 1
    """Decode workers that take new requests of the model."""
    queued_tokens: int = 0
    """Prompt tokens ahead of the request on the prefill worker."""
    candidates: tuple[Candidate, ...] = ()
    """If wanted, and the policy predicts costs: of each pool the chosen worker, then the next best ones."""
    local_tokens: int | None = None
    """Prompt tokens that the decode worker may compute itself; None: that was not decided with the pair."""

    @property
    def is_own(self) -> bool:
        """Whether one worker is both, so that nothing is handed off."""
        return self.decode is not None and self.decode.key == self.prefill.key


class Router(Protocol):
    """A routing policy. Implementations neither await nor read clocks."""

    def choose_pair(
        self, snapshot: PoolSnapshot, loads: LoadLedger, request: RoutingRequest, now: float
    ) -> Pair | None:
        """The pair to use, or None if no complete pair can serve the request now.

        A neutral worker counts as one of the pool that it leans to; as a pair with itself only where there is no other.
        `loads` has the load of each worker of the snapshot. `now` is in seconds on the monotonic clock.
        """


def no_pair(snapshot: PoolSnapshot, request: RoutingRequest, retry_after_s: float) -> UnavailableError:
    """The error for a request that no complete pair can serve: SLOW_LANE, naming the lane, or NO_WORKER."""
    pools: tuple[PoolName, ...] = ("prefill", "decode") if request.needs_decode else ("prefill",)
    empty = [pool for pool in pools if not snapshot.serving(request.model, pool)]
    reason = "NO_WORKER"
    if empty:
        message = f"no {' and no '.join(empty)} worker of model {request.model!r} is ready"
    elif refused := refused_lanes(snapshot, request.model):
        reason = "SLOW_LANE"
        message = f"model {request.model!r}: a lane is too slow (lane_policy: refuse): {refused}"
    else:
        message = f"no prefill worker of model {request.model!r} is connected to a decode worker"
    return UnavailableError(message, reason=reason, retry_after_s=retry_after_s)


def refused_lanes(snapshot: PoolSnapshot, model: str) -> str:
    """A description of a model's refused lanes, with reasons; empty if there are none."""
    return "; ".join(
        f"{worker.worker_id} to {peer.worker_id}: {lane.problem}"
        for worker in snapshot.serving(model, "prefill")
        for peer, lane in snapshot.handoff_lanes_of(worker)
        if lane.refused
    )
