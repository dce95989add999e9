"""The interface of routing policies, from a RoutingRequest to a Pair, and conditional disaggregation: when a decode
worker computes a prompt itself, without prefill worker and handoff. Pure.

The default policy is in `coordinator.routing.prefix_router`.

`local_prefill: auto` compares, by the workers' latency models, when the first token comes either way:

    split   queue of the prefill worker, compute there, transfer of the KV
    local   prompts that wait at the decode worker, compute there beside its streams

The decision ignores decode workers other than the one that the router has chosen; prompts and streams that arrive
meanwhile; that a decode worker whose cache turns out to lack more of the prompt asks for the handoff after all; and
that prefill workers may stay idle while decode workers compute prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from coordinator.request.state import DEFAULT_OUTPUT_TOKENS, NO_COST, Candidate, PairCost
from coordinator.workers.load import DecodeLoad, PrefillLoad, WorkerLoads
from coordinator.workers.prefix_index import NO_HITS, PrefixHits
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey
from splitserve.config.coordinator import LocalPrefill
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


NO_LIMIT = 2**32 - 1
"""Number of local prefill tokens that lets the decode worker compute the prompt however much of it is uncached."""
MAX_TOKENS_WITHOUT_TARGET = 256
"""Most uncached tokens of a prompt that is computed beside streams without a TPOT target."""
MIN_CHUNK_TOKENS = 16
"""Fewest prompt tokens that the engine computes in a step beside streams, whatever their targets."""


def local_prefill_tokens(
    prefill: PrefillLoad,
    decode: DecodeLoad,
    prompt_tokens: int,
    cost: PairCost,
    tpot_s: float | None,
    *,
    behind_queue: bool = True,
) -> int:
    """Prompt tokens that the decode worker may compute itself: all that it lacks, or 0.

    `cost` has the leading tokens that each worker caches, and the time to transfer KV between them. `tpot_s`: the
    request's TPOT target; None: none. `behind_queue`: False ignores the prompts that wait at the prefill worker. A
    decode worker that has not computed a prompt yet counts as fast as the prefill worker.
    """
    handing_off = prefill.latency.prefill
    computing = decode.latency.prefill or handing_off
    cached = min(cost.decode_cached_tokens, prompt_tokens - 1)
    tokens, waiting_tokens = prompt_tokens - cached, decode.waiting_prompt_tokens
    step_s = decode.latency.decode_step_s(decode.streams, decode.computed_context) if decode.streams else 0.0
    strictest_s = min(filter(None, (tpot_s, *decode.targets_s[:1])), default=None)
    # 1. Without measurements the prompt is handed off.
    if handing_off is None or computing is None or step_s is None:
        return 0
    # 2. Without a TPOT target a long prompt is handed off; a short one delays the streams little.
    if strictest_s is None and tokens > MAX_TOKENS_WITHOUT_TARGET:
        return 0
    # Time for the waiting prompts and this one, if no sequence is decoded meanwhile.
    local_s = computing.prefill_s(waiting_tokens) + computing.prefill_s(tokens, cached)
    # 3. Beside streams with a target each step computes as many prompt tokens as the target leaves time for.
    if decode.streams and strictest_s is not None:
        chunk = computing.tokens_within(strictest_s - step_s, prompt_tokens)
        # 3a. The target leaves too little time: the streams would miss it.
        if chunk < MIN_CHUNK_TOKENS:
            return 0
        # 3b. The prompts take this many steps, each as long as the target.
        local_s = max(local_s, math.ceil((waiting_tokens + tokens) / chunk) * strictest_s)
    # 4. The way that brings the first token sooner.
    queue_s = handing_off.token_s * prefill.queued_tokens if behind_queue else 0.0
    uncached_s = handing_off.prefill_s(prompt_tokens - cost.cached_tokens, cost.cached_tokens)
    return tokens if local_s < queue_s + uncached_s + cost.transfer_s else 0


def local_tokens_of_pair(
    mode: LocalPrefill,
    pair: Pair,
    prompt_tokens: int,
    loads: WorkerLoads,
    tpot_s: float | None,
    *,
    behind_queue: bool = True,
) -> int:
    """Prompt tokens that the decode worker of a pair may compute itself, for a request with this TPOT target; 0: the
    prompt is handed off. `mode` is the setting `local_prefill`. `behind_queue`: as for `local_prefill_tokens`."""
    if pair.decode is None:
        return 0
    if pair.is_own or mode == "always":
        return NO_LIMIT
    prefill, decode = loads.prefill.get(pair.prefill.key), loads.decode.get(pair.decode.key)
    if mode == "never" or prefill is None or decode is None:  # None: the worker is gone
        return 0
    return local_prefill_tokens(prefill, decode, prompt_tokens, pair.cost, tpot_s, behind_queue=behind_queue)
