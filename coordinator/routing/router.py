"""The interface of routing policies, from a RoutingRequest to a Pair. Pure.

The default policy is in `coordinator.routing.prefix_router`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.request.state import DEFAULT_OUTPUT_TOKENS, NO_COST, Candidate, PairCost
from coordinator.workers.load import WorkerLoads
from coordinator.workers.prefix_index import NO_HITS, PrefixHits
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey
from splitserve.errors import UnavailableError
from splitserve.roles import PoolName

RETRY_AFTER_S = 1.0
"""Retry hint of a coordinator that cannot serve a request now."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A routing policy's view of a request."""

    model: str
    prompt_tokens: int
    """Tokens to compute: the prompt and, on a resume, the tokens already sent."""
    needs_decode: bool = True
    """False if the answer ends with the token that the prefill worker samples."""
    exclude: frozenset[WorkerKey] = frozenset()
    """Boots that have failed this request."""
    turn: int = 0
    """A running number that breaks ties, so that equal workers take turns."""
    hits: PrefixHits = NO_HITS
    """The cached part of the prompt on each worker."""
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS
    """Estimate of the remaining output."""
    session_id: str = ""
    """Requests of one session prefer the same workers; empty: no session."""
    class_rank: int = 0
    """Requests of a higher class overtake others in a worker's queue; see `CLASS_RANKS`."""
    is_local: bool = False
    """Whether the decode worker computes the prompt in any case."""
    wants_candidates: bool = False
    """Whether to fill in `Pair.candidates`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and, unless the request needs none, a decode worker to which it is connected. A worker of role
    `both` may be both."""

    prefill: Worker
    decode: Worker | None
    cost: PairCost = NO_COST
    """The predicted cost."""
    candidates: tuple[Candidate, ...] = ()
    """If wanted: of each pool the chosen worker, then the next best ones."""

    @property
    def is_own(self) -> bool:
        """Whether one worker is both, so that there is no handoff."""
        return self.decode is not None and self.decode.key == self.prefill.key


class Router(Protocol):
    """A routing policy. Implementations neither await nor read clocks."""

    def choose_pair(self, snapshot: PoolSnapshot, loads: WorkerLoads, request: RoutingRequest) -> Pair | None:
        """The pair to use, or None if no complete pair can serve the request now.

        A worker of role `both` is in both pools, and may be a pair with itself, without a handoff. `loads` has the load
        of each worker of the snapshot.
        """


def no_pair(snapshot: PoolSnapshot, request: RoutingRequest, retry_after_s: float) -> UnavailableError:
    """The error for a request that no complete pair can serve: SLOW_LANE, naming the lane, or NO_WORKER."""
    pools: tuple[PoolName, ...] = ("prefill", "decode") if request.needs_decode else ("prefill",)
    empty = [pool for pool in pools if not snapshot.accepting(request.model, pool)]
    reason = "NO_WORKER"
    if empty:
        message = f"no {' and no '.join(empty)} worker of model {request.model!r} is ready"
    elif refused := [
        f"{worker.worker_id} to {peer.worker_id}: {lane.problem}"
        for worker in snapshot.accepting(request.model, "prefill")
        for peer, lane in snapshot.handoff_lanes_of(worker)
        if lane.refused
    ]:
        reason = "SLOW_LANE"
        message = f"model {request.model!r}: a lane is too slow (lane_policy: refuse): {'; '.join(refused)}"
    else:
        message = f"no prefill worker of model {request.model!r} is connected to a decode worker"
    return UnavailableError(message, reason=reason, retry_after_s=retry_after_s)
