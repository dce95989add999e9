"""The coordinator's router and its choice of who computes a prompt, on simulated replicas."""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.simulation.cluster.replica import SimulatedReplica, SimulatedRequest
from autoscaler.simulation.cluster.simulated_registry import KV_BLOCK_TOKENS, MODEL, SimulatedRegistry
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.traces.trace import BLOCK_TOKENS
from coordinator.request.state import DEFAULT_OUTPUT_TOKENS, RequestEstimate
from coordinator.routing.local_prefill import local_tokens_of_pair
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.router import Router, RoutingRequest
from coordinator.workers.load import Flight
from coordinator.workers.prefix_index import NO_HITS, PrefixHits

_OUTPUT_MEMORY = 64
"""Number of recent answers, approximately, that the expected output length averages over."""


class RoutedRequest(NamedTuple):
    """Where a request goes."""

    prefill: SimulatedReplica | None
    """Computes the prompt and hands it off; None when the decode replica computes it."""
    decode: SimulatedReplica | None
    """None for answers of one token."""
    relieves_prefill: bool
    """Whether the decode replica computes the prompt only because prompts wait at the prefill replica."""


class RoutedWorkers:
    """Presents the replicas in rotation as workers to the coordinator's router, account of work and prefix index."""

    def __init__(self, scenario: Scenario, router: Router | None = None) -> None:
        self._scenario = scenario
        self.registry = SimulatedRegistry(scenario.engine)
        self._router = PrefixRouter() if router is None else router
        self._turn = -1
        self._expected_output, self._answers = float(DEFAULT_OUTPUT_TOKENS), 0

    def answered(self, request: SimulatedRequest) -> None:
        """Updates the expected output length with a complete answer, as `coordinator.request.state` does."""
        self._answers = min(self._answers + 1, _OUTPUT_MEMORY)
        self._expected_output += (request.output_tokens - self._expected_output) / self._answers

    def reserved(self, request: SimulatedRequest, flight: Flight) -> None:
        """Notes that a decode replica has reserved KV for a request, whose prompt begins now."""
        prefill = flight.prefill if request.prefill is not None else None
        self.registry.loads.prompt_begun(flight, prefill, flight.awaited_tokens)

    def choose(self, request: SimulatedRequest, flight: Flight, now_s: float) -> RoutedRequest | None:
        """Chooses the replicas for a request, and enters it in the account of work; None while a pool has no replica in
        rotation."""
        self._turn += 1
        registry, tokens = self.registry, request.prompt_tokens
        registry.take_reports(now_s)
        if request.block_ids:
            registry.take_cache_changes(now_s)
        routing_request = RoutingRequest(
            MODEL.name,
            tokens,
            request.output_tokens > 1,
            turn=self._turn,
            hits=self._hits(request, now_s),
            expected_output_tokens=self._expected_output,
        )
        pair = self._router.choose_pair(registry.snapshot, registry.loads, routing_request, now_s)
        if pair is None:
            return None
        prefill, decode = pair.prefill, pair.decode
        lacking = tokens - min(pair.cost.decode_cached_tokens, tokens - 1)
        mode, tpot_s = self._scenario.local_prefill, self._scenario.tpot_target_s
        choice = mode, pair, tokens, registry.loads, tpot_s
        is_local = local_tokens_of_pair(*choice) >= lacking
        relieves_prefill = is_local and not local_tokens_of_pair(*choice, behind_queue=False)
        registry.loads.route(
            flight,
            prefill.key,
            decode.key if decode is not None else None,
            tokens - pair.cost.cached_tokens,
            local_tokens=lacking if is_local and not pair.is_own else 0,
        )
        if request.block_ids:
            keys = dict.fromkeys(worker.key for worker in (prefill, decode) if worker is not None)
            registry.index.expect(keys, request.block_ids, now_s)
        return RoutedRequest(
            None if is_local else registry.replicas[prefill.worker_id],
            None if decode is None else registry.replicas[decode.worker_id],
            relieves_prefill,
        )

    def estimate(self, request: SimulatedRequest, now_s: float) -> RequestEstimate:
        """The estimate for a request that arrives now, as `coordinator.request.state` makes it."""
        hits = self._hits(request, now_s)
        held = max((depth for depth, _ in hits.levels), default=0) * KV_BLOCK_TOKENS
        held = min(held, request.prompt_tokens - 1)
        return RequestEstimate(self._expected_output, float(request.prompt_tokens - held), hits)

    def _hits(self, request: SimulatedRequest, now_s: float) -> PrefixHits:
        """The cached part of a prompt on each replica, in KV blocks. The index counts the trace's larger blocks."""
        if not request.block_ids:
            return NO_HITS
        hits = self.registry.index.hits(request.block_ids, now_s)
        blocks = BLOCK_TOKENS // KV_BLOCK_TOKENS
        return PrefixHits(tuple((depth * blocks, slots) for depth, slots in hits.levels))
